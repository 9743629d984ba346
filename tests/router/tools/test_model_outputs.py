"""An answer depends on the text of its output alone, not on how that is cut or sent.

A good call is found whatever stands before it, arguments of a call that has ended are a JSON object, and what
is no call is content as it was written.
"""

from __future__ import annotations

import json
import random

import pytest

from services.router.tools.conversation_format import ConversationFormat
from services.router.tools.families import FAMILIES, ToolFamily
from services.router.tools.output_parser import OutputParser, OutputStructure
from services.router.tools.pieces import CallArguments, CallBegin, CallEnd, Content, Piece
from tests.router.tools.model_outputs import USE, Output, cuts_of, noise, outputs_of

COUNTS = [pytest.param(40, 12, id="some"), pytest.param(300, None, id="all", marks=pytest.mark.slow)]


def parsed(structure: OutputStructure, parts: list[str]) -> tuple[str, list[tuple[str, str]], frozenset[int]]:
    """Content, calls, and which of them have ended, of an output that comes in these parts."""
    parser = OutputParser(structure)
    pieces: list[Piece] = []
    for number, part in enumerate(parts):
        pieces += parser.push(part, last=number == len(parts) - 1)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls = [[piece.name, ""] for piece in pieces if isinstance(piece, CallBegin)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    ended = frozenset(piece.index for piece in pieces if isinstance(piece, CallEnd))
    return content, [(name, arguments) for name, arguments in calls], ended


def structure_of(family: ToolFamily) -> OutputStructure:
    structure = ConversationFormat(family).structure(USE, "", guided=False)
    assert structure is not None
    return structure


def check(output: Output, found: tuple[str, list[tuple[str, str]], frozenset[int]]) -> None:
    """Asserts what holds for every output."""
    content, calls, ended = found
    if not calls:
        assert content == output.text
    good = [(name, json.loads(text)) for index, (name, text) in enumerate(calls) if index in ended]
    assert good == list(output.calls)
    at = 0
    for text in output.texts:
        place = content.find(text, at)
        assert place >= 0, f"not in the content: {text!r}"
        at = place + len(text)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(("count", "places"), COUNTS)
def test_an_answer_depends_on_the_text_alone(family: ToolFamily, count: int, places: int | None) -> None:
    structure = structure_of(family)
    for number, output in enumerate(outputs_of(family, count, seed=1)):
        whole = parsed(structure, [output.text])
        try:
            check(output, whole)
            for parts in cuts_of(output.text, random.Random(number), places):
                assert parsed(structure, parts) == whole, parts
        except AssertionError as error:
            raise AssertionError(f"output {number}: {output.text[:2000]!r}\n{error}") from None


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_markup_in_any_order(family: ToolFamily, count: int) -> None:
    structure, draw = structure_of(family), random.Random(family.name)
    for _ in range(count):
        text = noise(draw)
        content, calls, ended = whole = parsed(structure, [text])
        assert calls or content == text
        assert all(isinstance(json.loads(calls[index][1]), dict) for index in ended)
        for parts in cuts_of(text, draw, 3):
            assert parsed(structure, parts) == whole, parts
