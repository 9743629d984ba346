"""Calls of `loadgen` that the pages show are parsed by its own parser; none is run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loadgen.cli import COMMANDS, parser
from tests.support.documented_commands import documented


@pytest.mark.parametrize("command", documented("loadgen"), ids=" ".join)
def test_calls_of_the_pages_are_parsed(command: tuple[str, ...]) -> None:
    assert parser(command[0]).parse_args(command).command in COMMANDS


def test_a_command_imports_its_own_module_alone() -> None:
    script = "import sys; from loadgen.cli import parser; parser('trace'); print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.splitlines())
    assert "loadgen.commands.trace" in loaded
    assert not loaded & {f"loadgen.commands.{name}" for name in COMMANDS.keys() - {"trace"}}


def test_there_are_documented_calls() -> None:
    assert len(documented("loadgen")) > 5
