"""A command asked for the impossible says so in one line, with exit code 2, and leaves nothing running."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from services.cli.main import main
from tests.e2e.support.cluster import CLUSTER_SECRET
from tests.support.checkpoints import FAMILIES

UP, DEMO, WORKER = ("up",), ("demo",), ("worker", "--role", "both")
ANY_PORTS = ("--http-port", "0", "--grpc-port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[1].make(tmp_path_factory.mktemp("model"), sharded=True)


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def baton(*arguments: str) -> tuple[int, str, str]:
    """Runs a command and returns exit code, stdout and stderr."""
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    environment = {**os.environ, "BATON_CLUSTER_SECRET": CLUSTER_SECRET}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, env=environment
    )
    return done.returncode, done.stdout, done.stderr


def in_this_process(*arguments: str) -> tuple[int, str, str]:
    """The same of its `main`, for what it refuses before it starts anything."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def refused_at_once(*arguments: str, by: Callable[..., tuple[int, str, str]] = in_this_process) -> str:
    """Exit code 2, and one line is all that it wrote."""
    code, out, err = by(*arguments)
    assert code == 2, (arguments, out, err)
    assert out == "", arguments
    assert err.count("\n") == 1, err
    assert "error: " in err
    return err


def all_refused(commands: Iterable[Iterable[str]]) -> list[str]:
    return [refused_at_once(*command) for command in commands]


@pytest.mark.parametrize("command", [UP, DEMO, WORKER], ids=lambda command: command[0])
def test_the_command_itself(command: tuple[str, ...], tmp_path: Path) -> None:
    error = refused_at_once(*command, "--model", str(tmp_path / "none"), by=baton)
    assert str(tmp_path / "none") in error


@pytest.mark.parametrize("missing", ["config.json", "*.safetensors", "everything"])
def test_a_model_folder_that_lacks_a_file(missing: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    if missing != "everything":
        shutil.copytree(model, folder)
        for path in folder.glob(missing):
            path.unlink()
    for error in all_refused((*command, "--model", str(folder)) for command in (UP, DEMO, WORKER)):
        assert str(folder) in error


def test_a_model_folder_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    for error in all_refused((*command, "--model", str(folder)) for command in (UP, DEMO)):
        assert "tokenizer.json" in error


Break = Callable[[Path], None]


def _lose_a_shard(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def _cut_a_shard(folder: Path) -> None:
    shard = next(folder.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-100])


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _unknown_family(folder: Path) -> None:
    path = folder / "config.json"
    other = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))


@pytest.mark.parametrize(
    ("damage", "ray"),
    [
        pytest.param(_lose_a_shard, "none", marks=pytest.mark.slow),
        pytest.param(_cut_a_shard, "none", marks=pytest.mark.slow),
        pytest.param(_cut_a_shard, "local", marks=pytest.mark.slow),
        (_break_config, "none"),
        pytest.param(_unknown_family, "none", marks=pytest.mark.slow),
    ],
)
def test_damage_that_a_worker_finds(damage: Break, ray: str, model: Path, tmp_path: Path) -> None:
    """The last line names it."""
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    damage(folder)
    code, out, err = baton("up", "--both", "1", "--model", str(folder), "--ray-address", ray, *ANY_PORTS)
    assert (code, out) == (2, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("baton: error: ")
    assert str(folder) in last
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_transport_that_the_workers_cannot_have(model: Path) -> None:
    reported = ("--device", "cpu", "--transport", "nccl", "--ray-address", "none", *ANY_PORTS)
    code, out, err = baton("up", "--both", "1", "--model", str(model), *reported)
    assert (code, out) == (2, ""), err
    assert err.splitlines()[-1].startswith("baton: error: both-0: transport nccl: it connects GPUs")
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_worker_by_itself_reports_it_in_its_protocols_line(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    _lose_a_shard(folder)
    code, out, err = baton(*WORKER, "--model", str(folder))
    assert code == 2, err
    error = json.loads(out)["error"]
    assert error["kind"] == "invalid"
    assert str(folder) in error["message"]
    assert "Traceback" not in err


def test_a_worker_by_itself_needs_its_clusters_secret(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BATON_CLUSTER_SECRET", raising=False)
    assert "BATON_CLUSTER_SECRET" in refused_at_once(*WORKER, "--model", str(model))
    short = tmp_path / "short"
    short.write_text("too short\n")
    for path in (short, tmp_path / "none"):
        error = refused_at_once(*WORKER, "--model", str(model), "--cluster-secret-file", str(path))
        assert str(path) in error
        assert "too short\n" not in error


@pytest.mark.parametrize("command", [UP, DEMO], ids=lambda command: command[0])
def test_unknown_keys_and_absurd_values(command: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    cases = (
        ("engine: {slotz: 3}\n", "engine.slotz"),
        ("colour: red\n", "colour"),
        ("engine: {slots: 0}\n", "slots"),
        ("engine: [1]\n", "engine"),
        ("- a\n", "list"),
        ("a: [\n", "YAML"),
        ("prefill: 1\ndecode: 0\n", "decode"),
    )
    for number, (text, _) in enumerate(cases):
        (tmp_path / f"{number}.yaml").write_text(text)
    files = [tmp_path / f"{number}.yaml" for number in (*range(len(cases)), 404)]
    errors = all_refused((*command, "--model", str(model), "-c", str(file)) for file in files)
    for (_, word), line in zip((*cases, ("", "404.yaml")), errors, strict=True):
        assert word in line


def test_unknown_and_absurd_flags(model: Path) -> None:
    flags = (("--slotz", "3"), ("--slots", "many"), ("--dtype", "int8"))
    asked = [(*command, *flag) for command in (UP, DEMO, WORKER) for flag in flags]
    asked.append(("worker", "--role", "cook"))
    for command, error in zip(
        asked, all_refused((*command, "--model", str(model)) for command in asked), strict=True
    ):
        assert command[-2] in error


def test_a_port_in_use(taken: str, model: Path) -> None:
    asked: list[tuple[str, ...]]
    asked = [(*UP, "--http-port", taken), (*DEMO, "--grpc-port", taken)]
    asked.append((*WORKER, "--port", taken))
    for command in asked:
        error = refused_at_once(*command, "--model", str(model), by=baton)
        assert command[-2] in error
        assert f":{taken}" in error
