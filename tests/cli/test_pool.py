"""`baton pool list`: the id that `baton pool switch` takes is whole on any terminal."""

from __future__ import annotations

import pytest

from baton.v1 import admin_pb2, worker_pb2
from services.cli import pool
from services.cli.main import main

IDS = ("5c1d0e6f7a2b", "e07b93a1c4d8")


def listed(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the table on a terminal of `width` columns."""
    properties = worker_pb2.Pool(
        model="chat",
        checkpoint=b"\x9f" * 32,
        tokenizer=b"\xb2" * 32,
        kv_format="bfloat16/64/native",
        numerics="fast",
    )
    pools = [
        admin_pb2.PoolStatus(
            id=one,
            current=one == IDS[0],
            ready=True,
            compatible=True,
            workers=4,
            running=1234,
            pool=properties,
        )
        for one in IDS
    ]
    answer = admin_pb2.AdminServiceGetStatusResponse(pools=pools)
    monkeypatch.setattr(pool, "admin_call", lambda address, call: answer)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["pool", "list"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (120, ["pool", "state", "workers", "requests", "checkpoint", "tokenizer", "KV", "numerics", "model"]),
        (80, ["pool", "state", "workers", "requests", "KV", "numerics", "model"]),
        (60, ["pool", "state", "workers", "requests", "model"]),
    ],
)
def test_a_narrow_terminal_has_fewer_columns(
    width: int, headings: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = listed(width, capsys, monkeypatch)
    assert max(map(len, lines)) <= width
    assert lines[0].split() == headings
    assert [line.split()[0] for line in lines[2:]] == list(IDS)
    assert "…" not in "".join(lines)
