"""The scripts that measure on GPUs, with programs in their PATH that write down how they are called: each
command is one that the measuring programs take, or names tests that there are; and what is printed last."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench.options import PARTS, run_program

ROOT = Path(__file__).parents[2]
TABLES = "baton/engine/gemm_dispatch/tables"
# Programs of the scripts: one that runs what it limits only where that is a shell, and two that run nothing.
NOTE = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
if {{name!r}} == "timeout":
    while words[0].startswith("-"):
        words = words[2:]
    words = words[1:]
    if words[0] == "env":
        words = words[words.index("python"):]
    if words[0] == "bash":
        os.execvp("bash", words)
else:
    words = [{{name!r}}, *words]
with open(os.environ["NOTED"], "a") as file:
    file.write(json.dumps({{{{"words": words, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}}}}) + "\\n")
print(os.environ["SAYS"])
sys.exit(int(os.environ["CODE"]))
"""
PYTHON = f"""#!/usr/bin/env bash
if [[ $1 == -c ]]; then exec cat; fi
exec {sys.executable} "$@"
"""
OF_FIGURES = (
    "numbers wide products-each drafts-exact drafts-rows drafts-rows-fp8 drafts-attention drafts-text"
    " drafts-oracle drafts-served table attention-normed steps experts-exact experts-tokens experts"
    " experts-tunings experts-budget experts-more experts-served tests gpus-tables gpus-faults gpus"
    " gpus-served experts-goodput gpus-steps"
)


def noted(folder: Path, *words: str, code: int = 0, says: str = "") -> tuple[list[dict[str, Any]], str]:
    """Runs a script of `tools` from a tree that has only what it needs → the commands, and what it prints."""
    programs, tree = folder / "bin", folder / "tree"
    if not programs.exists():
        programs.mkdir()
        for name in ("timeout", "pytest"):
            (programs / name).write_text(NOTE.format(name=name))
        (programs / "python").write_text(PYTHON)
        for program in programs.iterdir():
            program.chmod(0o755)
        shutil.copytree(ROOT / TABLES, tree / TABLES)
        (tree / "tools").symlink_to(ROOT / "tools")
    notes = folder / "noted"
    notes.write_text("")
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "NOTED": str(notes), "CODE": str(code), "SAYS": says,
        "XDG_CACHE_HOME": str(folder / "cache"), "BASE": str(tree),
    }  # fmt: skip
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return [json.loads(line) for line in notes.read_text().splitlines()], done.stdout


class ParsedError(Exception):
    """A program has parsed its command line."""


def stop_here(*_: object) -> None:
    raise ParsedError


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Has a measuring program parse its words, and fails where it refuses them."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any) -> Any:
        parse_args(parser, *given)
        raise ParsedError

    def run(words: list[str]) -> None:
        assert words[:2] == ["python", "-m"]
        package, subject = words[2].split(".")
        assert package == "bench"
        monkeypatch.setattr("sys.argv", words[2:])
        module = import_module(f"bench.{subject}.__main__")
        if words[3] not in PARTS.get(subject, {}):
            # Beyond its parser, it refuses cases that do not fit together.
            monkeypatch.setattr(module, "run_all", stop_here, raising=False)
        else:
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        try:
            with pytest.raises(ParsedError):
                run_program(subject, module.main)
        finally:
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)

    return run


def check_tests(words: list[str]) -> None:
    """The test paths and markers in the commands exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    markers = {line.partition(":")[0] for line in known}
    assert words[1:].count("-vv") == 1, "one -v is taken back by the -q of pyproject.toml"
    named = re.findall(r"\w+", words[words.index("-m") + 1])
    assert set(named) <= {*markers, "and", "or", "not"}
    paths = [ROOT / word.partition("::")[0] for word in words if word.startswith("tests")]
    assert paths
    assert [path for path in paths if not path.exists()] == []


def check(commands: list[dict[str, Any]], parse: Callable[[list[str]], None]) -> None:
    for words in (command["words"] for command in commands):
        if words[0] == "pytest":
            check_tests(words)
        else:
            parse(words)


def test_every_part_of_one_gpu_and_of_two(tmp_path: Path, parse: Callable[[list[str]], None]) -> None:
    commands, _ = noted(tmp_path, "tools/gpu_figures.sh", str(tmp_path / "out"), "10000", *OF_FIGURES.split())
    index = (tmp_path / "out" / "parts.txt").read_text().splitlines()
    assert len(commands) == len(index) > 45
    check(commands, parse)


@pytest.mark.parametrize(
    ("count", "number", "gpus"),
    [
        ("1", "1", {"0"}), ("1", "2", {"0"}), ("1", "3", {"0"}),
        ("2", "1", {"0,1", "0", "1"}), ("2", "2", {"0,1", "0", "1"}), ("2", "3", {"0", "1"}),
        ("2", "4", {"0,1", "0", "1"}),
    ],
)  # fmt: skip
def test_the_calls_of_a_session(
    tmp_path: Path,
    parse: Callable[[list[str]], None],
    monkeypatch: pytest.MonkeyPatch,
    count: str,
    number: str,
    gpus: set[str],
) -> None:
    """A part that fails keeps no other from running, and the end names the tests."""
    monkeypatch.setenv("GPUS", count)
    failed = "FAILED tests/bench/test_shapes.py::test_it[a b] - AssertionError: no"
    out = tmp_path / "out"
    commands, printed = noted(tmp_path, "tools/gpu_session.sh", number, str(out), code=1, says=failed)
    assert {command["gpus"] for command in commands} == gpus
    assert len(commands) >= (1 if (count, number) == ("1", "3") else 4)
    check(commands, parse)
    assert printed.count("exit code 1") == len(commands)
    named = "FAILED tests/bench/test_shapes.py: test_it[a b] (AssertionError: no)"
    assert printed.count(named) == len(commands)
    files = {path.name for path in out.iterdir()}
    assert f"logs-{number}.tar.gz" in files
    assert len(files) <= 8


def test_what_is_printed_last_is_short_and_has_all_tests(tmp_path: Path) -> None:
    names = [f"tests/engine/test_{n % 7}.py::test_{n}[some bfloat16 {n}]" for n in range(120)]
    index = "steps\t0\t9\tpython\nmany\t1\t300\tpytest\nlate\tskipped\t0\tpytest\n"
    (tmp_path / "parts.txt").write_text(index)
    step = {"shape": "tiny", "dtype": "bf16", "batch": 8, "tpot_ms": 8.25, "device": "H200", "x": "x" * 300}
    (tmp_path / "steps.log").write_text(f"starts\n{json.dumps(step)}\n" * 200)
    lines = [f"[gw{n % 8}] [ {n % 100:2}%] FAILED {name} " for n, name in enumerate(names[:60])]
    lines += [f"{name} FAILED [ 50%]" for name in names[60:90]]
    lines += [f"FAILED {name} - no" for name in names[90:]]
    lines += ["=== 120 failed, 3 passed in 300.12s (0:05:00) ===", ""]
    (tmp_path / "many.log").write_text("\n".join(lines))
    command = [sys.executable, str(ROOT / "tools" / "part_summary.py"), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(printed) < 12_000
    assert all(name.partition("::")[2] in printed for name in names)
    assert "many: exit code 1, 300 s, 120 failed, 3 passed in 300.12s (0:05:00)" in printed
    assert "late: skipped, 0 s" in printed
    assert "batch 8, tpot_ms 8.25, x xxx" in printed
