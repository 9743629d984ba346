"""A command asked for the impossible says so in one line, with exit code 2, and leaves nothing running."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import FAMILIES

UP, DEMO, WORKER = ("up",), ("demo",), ("worker", "--role", "both")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[1].make(tmp_path_factory.mktemp("model"), sharded=True)


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def baton(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    command = [sys.executable, "-m", "baton.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def refused_at_once(*arguments: str) -> str:
    """Exit code 2, and one line is all that it wrote."""
    code, out, err = baton(*arguments)
    assert code == 2, (arguments, out, err)
    assert out == "", arguments
    assert err.count("\n") == 1, err
    assert "error: " in err
    return err


@pytest.mark.parametrize("command", [UP, DEMO, WORKER], ids=lambda command: command[0])
@pytest.mark.parametrize("missing", ["config.json", "*.safetensors", "everything"])
def test_a_model_folder_that_lacks_a_file(
    command: tuple[str, ...], missing: str, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    if missing != "everything":
        shutil.copytree(model, folder)
        for path in folder.glob(missing):
            path.unlink()
    assert str(folder) in refused_at_once(*command, "--model", str(folder))


@pytest.mark.parametrize("command", [UP, DEMO], ids=lambda command: command[0])
def test_a_model_folder_without_a_tokenizer(command: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused_at_once(*command, "--model", str(folder))


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


@pytest.mark.parametrize("damage", [_lose_a_shard, _cut_a_shard, _break_config, _unknown_family])
def test_damage_that_a_worker_finds(damage: Break, model: Path, tmp_path: Path) -> None:
    """The last line names it; a worker by itself says it in its protocol's line on stdout."""
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    damage(folder)
    ports = ("--http-port", "0", "--grpc-port", "0")
    code, out, err = baton("up", "--model", str(folder), *ports)
    assert (code, out) == (2, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("baton: error: ")
    assert str(folder) in last
    assert "Traceback" not in err
    code, out, err = baton(*WORKER, "--model", str(folder))
    assert code == 2, err
    error = json.loads(out)["error"]
    assert error["kind"] == "invalid"
    assert str(folder) in error["message"]
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [UP, DEMO], ids=lambda command: command[0])
def test_unknown_keys_and_absurd_values(command: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    for text, word in (
        ("engine: {slotz: 3}\n", "engine.slotz"),
        ("colour: red\n", "colour"),
        ("engine: {slots: 0}\n", "slots"),
        ("engine: [1]\n", "engine"),
        ("- a\n", "list"),
        ("a: [\n", "YAML"),
        ("prefill: 1\ndecode: 0\n", "decode"),
    ):
        config.write_text(text)
        assert word in refused_at_once(*command, "--model", str(model), "-c", str(config))
    assert "no-such" in refused_at_once(*command, "-c", str(tmp_path / "no-such.yaml"))


def test_unknown_and_absurd_flags(model: Path) -> None:
    for flags, word in (
        (("--slotz", "3"), "--slotz"),
        (("--slots", "many"), "--slots"),
        (("--dtype", "int8"), "--dtype"),
    ):
        for command in (UP, DEMO, WORKER):
            assert word in refused_at_once(*command, "--model", str(model), *flags)
    assert "--role" in refused_at_once("worker", "--role", "cook", "--model", str(model))


def test_a_port_in_use(taken: str, model: Path) -> None:
    for command, flag in (
        (UP, "--http-port"),
        (UP, "--grpc-port"),
        (DEMO, "--http-port"),
        (DEMO, "--grpc-port"),
        (WORKER, "--port"),
    ):
        err = refused_at_once(*command, "--model", str(model), flag, taken)
        assert flag in err
        assert f":{taken}" in err
