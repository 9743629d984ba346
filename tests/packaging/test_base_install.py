"""`pip install baton-serve` and no more: each command works, or says in one line what else to install."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.cli.common import extras
from tests.packaging.base_only import base_packages

NOWHERE = "127.0.0.1:1"
# Each with its exit code and what its one line on stderr has; none for one that works.
COMMANDS: dict[tuple[str, ...], tuple[int, str]] = {
    ("baton", "--help"): (0, ""),
    ("baton", "--version"): (0, ""),
    ("baton", "up", "--help"): (0, ""),
    ("baton", "up"): (2, "pip install 'baton-serve[serve]'"),
    ("baton", "up", "--ray-address", "none", "--model", "random"): (2, "pip install 'baton-serve[serve]'"),
    ("baton", "up", "--redis-url", "redis://there"): (2, "pip install 'baton-serve[serve]'"),
    ("baton", "demo"): (2, "pip install 'baton-serve[serve]'"),
    ("baton", "worker", "--role", "both", "--model", "m"): (2, "pip install 'baton-serve[worker]'"),
    ("baton", "ray", "certificate", "--authority", "a", "--host", "b", "--out", "c"): (
        2,
        "pip install 'baton-serve[cluster]'",
    ),
    ("baton", "keys", "list", "--config", "no-file"): (2, "pip install 'baton-serve[state]'"),
    ("baton", "audit", "verify", "no-file"): (2, "no-file"),
    ("baton", "router", "--config", "f"): (2, "pip install 'baton-serve[router]'"),
    ("baton", "check", "--http", "no-url", "--grpc", "a:1", "--model", "m"): (2, "--http must be a URL"),
    ("baton", "model", "fetch", "--config", "no-file"): (2, "cannot read no-file"),
    ("baton", "status", NOWHERE): (1, f"no answer from {NOWHERE}"),
    ("baton", "status", "--watch", "--once", NOWHERE): (1, f"no answer from {NOWHERE}"),
    ("baton", "drain", "--router", "--admin", NOWHERE): (1, f"no answer from {NOWHERE}"),
    ("baton", "pool", "list", "--admin", NOWHERE): (1, f"no answer from {NOWHERE}"),
    ("loadgen", "--help"): (0, ""),
    ("loadgen", "run", f"grpc://{NOWHERE}"): (2, f"no answer from grpc://{NOWHERE}"),
    ("loadgen", "run", f"http://{NOWHERE}"): (2, f"no answer from http://{NOWHERE}"),
    ("loadgen", "run", f"http://{NOWHERE}", "--parquet"): (2, "pip install 'baton-serve[parquet]'"),
    ("loadgen", "search", f"http://{NOWHERE}", "--goodput", "ttft:300"): (2, "no answer from"),
    ("loadgen", "sweep", f"http://{NOWHERE}", "--rates", "1"): (2, "no answer from"),
    ("loadgen", "size", "a", "--rates", "1", "--input-len", "1", "--output-len", "1"): (2, "a is neither"),
    ("loadgen", "compare", "a", "b"): (2, "a is not a run"),
    ("loadgen", "report", "a"): (2, "a is not a run"),
    ("loadgen", "trace", "a"): (2, "a: No such file"),
}


def test_each_command_works_or_names_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.packaging.base_only"],
        input=json.dumps(list(COMMANDS)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for command, (code, out, err) in zip(COMMANDS, json.loads(done.stdout), strict=True):
        wanted, words = COMMANDS[command]
        reported = f"{' '.join(command)}: {err}"
        assert code == wanted, reported
        assert words in err, reported
        assert err.count("\n") == (1 if words else 0), reported
        assert bool(out) is (wanted == 0), reported


def test_the_base_brings_neither_torch_nor_ray_nor_a_server() -> None:
    base = base_packages()
    assert {"grpcio", "httptools", "numpy", "pydantic", "rich", "typing-extensions"} <= base
    assert base.isdisjoint({"cryptography", "jinja2", "ray", "redis", "tokenizers", "torch", "uvloop"})


def installed_but(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    def distribution(name: str) -> object:
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return metadata.distribution(name)

    monkeypatch.setattr(extras, "distribution", distribution)


@pytest.mark.parametrize(
    ("missing", "required", "words"),
    [
        ("jinja2", ("router", "worker"), "(jinja2): pip install 'baton-serve[serve]'"),
        ("redis", ("worker",), "(redis): pip install 'baton-serve[worker]'"),
        ("ray", ("cluster",), "(ray): pip install 'baton-serve[cluster]'"),
    ],
)
def test_what_is_missing_is_named(
    missing: str, required: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras.require(*required)
    installed_but(monkeypatch, missing)
    with pytest.raises(BatonError) as raised:
        extras.require(*required)
    assert raised.value.kind is ErrorKind.INVALID
    assert raised.value.message.endswith(words)


def test_what_is_not_needed_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_but(monkeypatch, "ray", "torch")
    extras.require("router")


def test_a_checkout_that_was_never_installed_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "DISTRIBUTION", "no-such-distribution")
    extras.require("router")
