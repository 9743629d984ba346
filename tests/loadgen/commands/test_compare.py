"""`loadgen compare` with servers: each is sent the load of the first run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.analysis import run_folder
from tests.loadgen.fake_server import Behaviour
from tests.loadgen.processes import MAY_LAG, Served, loadgen, served


def sent(server: Served, folder: Path) -> list[tuple[int, float, int]]:
    """Each request of a run: its number, when it was due, and the checksum of the prompt that came."""
    prompts = server.prompts()
    return sorted(
        (record.conversation, record.scheduled, prompts[record.request_id])
        for record in run_folder.load(folder).records
    )


@pytest.mark.parametrize("protocol", ["grpc", pytest.param("http", marks=pytest.mark.slow)])
def test_a_server_is_sent_the_prompts_of_the_first_run(tmp_path: Path, protocol: str) -> None:
    folder, out = tmp_path / "first", tmp_path / "out"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with served(Behaviour(), tmp_path / "a") as one, served(Behaviour(), tmp_path / "b") as other:
        done = loadgen(
            *("run", getattr(one, protocol), "--rate", "60", "--num-requests", "30", "--processes", "2"),
            *("--input-len", "uniform:5-60", "--output-len", "uniform:1-4", "--burstiness", "0.5", *MAY_LAG),
            *("--warmup", "0", "--metrics-url", "http://127.0.0.1:1/metrics", "--out", str(folder)),
        )
        assert done.code in (0, 3), done.err
        compared = loadgen("compare", str(folder), getattr(other, protocol), "--json", "--out", str(out))
        assert compared.code == 0, compared.err
    (second,) = out.iterdir()
    assert list(compared.json["differences"]) == [str(second)]
    assert compared.json["caution"] == ""
    assert (second / "report.html").exists()
    assert len(sent(one, folder)) == 30
    assert sent(one, folder) == sent(other, second)
    settings = run_folder.load(second).settings
    assert settings.target.url == getattr(other, protocol)
    assert settings.generator.metrics_urls == ()


def test_servers_follow_a_run(tmp_path: Path) -> None:
    done = loadgen("compare", "grpc://127.0.0.1:1", "grpc://127.0.0.1:2")
    assert (done.code, done.out) == (2, "")
    assert "the first is the folder of a run" in done.err
    # Nothing is sent where a folder is none.
    assert loadgen("compare", str(tmp_path), "grpc://127.0.0.1:1").code == 2


def test_prompts_of_other_settings_are_a_caution(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    with served(Behaviour(), tmp_path) as server:
        for folder, tokens in zip(folders, ("5", "6"), strict=True):
            few = ("--num-requests", "3", "--rate", "60", "--seed", "5", "--warmup", "0", *MAY_LAG)
            loadgen("run", server.http, *few, "--input-len", tokens, "--out", str(folder))
    compared = loadgen("compare", *map(str, folders), "--json")
    assert "different prompts" in json.loads(compared.out)["caution"]
