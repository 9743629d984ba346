"""The audit log: its chain shows what was changed, its queue has a bound, and it goes on after a restart."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError
from services.cli.main import main
from services.common.observability import audit_log
from services.common.observability.audit_chain import FIRST_HASH, AuditRecord, line_of, verify
from services.common.observability.audit_log import MOST_FAILURES_PER_S, AuditFile, AuditLog


def written(path: Path, *records: AuditRecord) -> None:
    log = AuditFile(path)
    for record in records:
        log.record(record)
    log.close()


def ended(number: int) -> AuditRecord:
    return AuditRecord(
        "request", "stop", "ci", "acme", f"{number:032x}", "llama", "/v1/completions", number, 8
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_lines_have_what_is_known_and_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    written(path, ended(0), AuditRecord("admin", "drain", target="decode-0"))
    opened, request, drain = lines(path)
    assert (opened["event"], opened["line"], opened["previous"]) == ("opened", 1, FIRST_HASH)
    assert request.pop("time").endswith("+00:00")
    assert len(request.pop("previous")) == 64
    assert request == {
        "line": 2,
        "event": "request",
        "outcome": "stop",
        "key_id": "ci",
        "tenant": "acme",
        "request_id": "0" * 32,
        "model": "llama",
        "route": "/v1/completions",
        "prompt_tokens": 0,
        "completion_tokens": 8,
    }
    assert set(drain) == {"line", "time", "event", "outcome", "target", "previous"}
    assert path.stat().st_mode & 0o777 == 0o600
    found = verify([path])
    assert (found.first_line, found.last_line, found.dropped) == (1, 3, 0)


@pytest.mark.parametrize("seed", range(40))
def test_any_change_within_the_file_is_found(tmp_path: Path, seed: int) -> None:
    path, draw = tmp_path / "audit", random.Random(seed)
    written(path, *map(ended, range(20)))
    whole = path.read_bytes().splitlines(keepends=True)
    place = draw.randrange(1, len(whole) - 1)  # the last line has nothing after it that would show a change
    changed = list(whole)
    match draw.choice(("change", "remove", "insert", "swap", "copy")):
        case "change":
            at = draw.randrange(len(whole[place]))
            line = bytearray(whole[place])
            line[at] ^= 1 << draw.randrange(7)
            changed[place] = bytes(line)
        case "remove":
            del changed[place]
        case "insert":
            changed.insert(place, b'{"line": 5, "previous": ""}\n')
        case "swap":
            changed[place], changed[place - 1] = changed[place - 1], changed[place]
        case _:
            changed.insert(place, whole[place])
    path.write_bytes(b"".join(changed))
    with pytest.raises(BatonError, match="breaks the chain"):
        verify([path])


def test_it_goes_on_after_a_restart_and_cuts_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    written(path, ended(1))
    with open(path, "ab") as file:
        file.write(b'{"line": 3, "ti')
    written(path, ended(2))
    assert [line["event"] for line in lines(path)] == ["opened", "request", "opened", "request"]
    assert lines(path)[2]["outcome"] == "cut 15 bytes"
    assert verify([path]).last_line == 4


def test_a_renamed_file_is_continued_in_a_new_one(tmp_path: Path) -> None:
    path, old = tmp_path / "audit", tmp_path / "audit.1"
    log = AuditFile(path, look_s=0.0)
    log.record(ended(1))
    while log.lines < 2:
        pass
    path.rename(old)
    log.record(ended(2))
    log.close()
    assert verify([old, path]).first_line == 1
    assert verify([path]).first_line == 3
    with pytest.raises(BatonError, match="line 1 breaks the chain"):
        verify([path, old])


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AuditFile]:
    """One whose disk takes nothing until the test ends, with room for 10 records."""
    free = threading.Event()

    def slow(*given: Any) -> Any:
        free.wait(5)
        return line_of(*given)

    monkeypatch.setattr(audit_log, "line_of", slow)
    log = AuditFile(tmp_path / "audit", most_waiting=10)
    yield log
    free.set()
    log.close()
    dropped = [line.get("dropped", 0) for line in lines(tmp_path / "audit")]
    assert sum(dropped) == log.dropped == verify([tmp_path / "audit"]).dropped


def test_what_does_not_fit_is_dropped_and_counted(stuck: AuditFile) -> None:
    for number in range(500):
        stuck.record(ended(number))
    assert 480 <= stuck.dropped <= 490


def test_strangers_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.observability.audit_log.time.time", lambda: 1e9)
    written(tmp_path / "audit", *[AuditRecord("authentication", "unauthenticated")] * 500, ended(1))
    assert len(lines(tmp_path / "audit")) == MOST_FAILURES_PER_S + 2
    assert verify([tmp_path / "audit"]).dropped == 500 - MOST_FAILURES_PER_S


def test_a_full_disk_loses_records_and_no_line_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, full = tmp_path / "audit", os.write, [False]

    def torn(file: int, data: bytes) -> int:
        return write(file, data[:20]) if full[0] else write(file, data)

    log = AuditFile(path, look_s=0.0)
    log.record(ended(1))
    while log.lines < 2:
        pass
    monkeypatch.setattr(os, "write", torn)
    full[0] = True
    with capture_logs() as logs:
        for number in range(5):
            log.record(ended(number))
        while log.dropped < 5:
            pass
    full[0] = False
    log.record(ended(6))
    log.close()
    assert [entry["event"] for entry in logs] == ["audit_log_not_written"]
    assert verify([path]).dropped == 5
    assert lines(path)[-1]["dropped"] == 5


def test_refused_at_the_start(tmp_path: Path) -> None:
    log = AuditFile(tmp_path / "audit")
    for path, message in (
        (tmp_path / "audit", "another process writes it"),
        (tmp_path / "none" / "audit", "No such file"),
    ):
        with pytest.raises(BatonError, match=message):
            AuditFile(path)
    log.close()
    AuditLog().record(ended(1))  # records nothing


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "audit"
    written(path, ended(1), ended(2))
    assert main(["audit", "verify", str(path)]) == 0
    assert f"lines 1 to 3, 0 dropped, last hash {verify([path]).hash}" in capsys.readouterr().out
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil", 1))
    assert main(["audit", "verify", str(path)]) == 2
    assert "line 3 breaks the chain" in capsys.readouterr().err
    assert main(["audit", "verify", str(tmp_path / "none")]) == 2
