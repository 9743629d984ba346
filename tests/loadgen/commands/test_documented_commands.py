"""Calls of `loadgen` that the pages show are parsed by its own parser; none is run."""

from __future__ import annotations

import pytest

from loadgen.cli import COMMANDS, parser
from tests.support.documented_commands import documented


@pytest.mark.parametrize("command", documented("loadgen"), ids=" ".join)
def test_calls_of_the_pages_are_parsed(command: tuple[str, ...]) -> None:
    assert parser().parse_args(command).command in COMMANDS


def test_there_are_documented_calls() -> None:
    assert len(documented("loadgen")) > 5
