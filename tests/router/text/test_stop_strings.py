"""Stop strings: the cut does not depend on how the text was divided."""

from __future__ import annotations

import random
import sys
import tracemalloc
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.stop_strings import StopAutomaton, StopStrings, automaton_of

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first prefix that ends with a stop string, without the longest one it ends with."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


class Naive:
    """The behaviour that `StopStrings` must have, by trying every place: quadratic in the length of the
    strings."""

    def __init__(self, stops: list[str]) -> None:
        self.stops = stops
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        pending = "" if self.stopped else self.held + text
        for end in range(1, len(pending) + 1):
            lengths = [len(stop) for stop in self.stops if pending[:end].endswith(stop)]
            if lengths:
                self.stopped = True
                return pending[: end - max(lengths)]
        starts = (start for start in range(len(pending)) if self._may_become_one(pending[start:]))
        certain = next(starts, len(pending))
        self.held = pending[certain:]
        return pending[:certain]

    def _may_become_one(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self.stops)


def run(parts: list[str], stops: list[str]) -> tuple[str, bool]:
    watch = StopStrings(stops)
    text = "".join(watch.push(part) for part in parts) + watch.flush()
    return text, watch.stopped


@given(TEXT, STOPS, st.data())
def test_any_division_gives_the_same_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    parts, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(rest[:size])
        rest = rest[size:]
    assert run(parts, stops) == reference(text, stops)


@given(TEXT, STOPS)
def test_no_part_of_a_stop_string_is_returned_early(text: str, stops: list[str]) -> None:
    final, _ = reference(text, stops)
    watch, sent = StopStrings(stops), ""
    for character in text:
        sent += watch.push(character)
        assert final.startswith(sent)


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [("hello world", ["wor"], "hello "), ("xabcd", ["abcd", "bc"], "xa"), ("aab", ["ab", "aab"], "")],
)
def test_examples(text: str, stops: list[str], kept: str) -> None:
    assert run(list(text), stops) == (kept, True)


def test_without_stop_strings_no_text_is_held_back() -> None:
    watch = StopStrings(())
    assert watch.push("abc") == "abc"
    assert watch.flush() == ""


def test_held_back_text_is_returned_once() -> None:
    watch = StopStrings(["abc"])
    assert [watch.push("xab"), watch.flush(), watch.flush()] == ["x", "ab", ""]


LETTERS = st.text(alphabet="ab\0\u00e9", min_size=1, max_size=12)
REPEATED = st.builds(lambda part, times, end: part * times + end, LETTERS, st.integers(1, 4), LETTERS)


@given(st.lists(LETTERS | REPEATED, min_size=1, max_size=16), st.data())
def test_each_part_gives_what_a_naive_search_gives(stops: list[str], data: st.DataObject) -> None:
    """Texts are made of pieces of the stop strings, so that they nearly match."""
    pieces = st.sampled_from(stops).flatmap(
        lambda stop: st.tuples(st.integers(0, len(stop)), st.integers(0, len(stop))).map(
            lambda ends: stop[min(ends) : max(ends)]
        )
    )
    watch, naive = StopStrings(stops), Naive(stops)
    for part in data.draw(st.lists(LETTERS | pieces, max_size=20)):
        assert watch.push(part) == naive.push(part)
        assert watch.stopped == naive.stopped
    assert watch.flush() == ("" if naive.stopped else naive.held)


HARD: dict[str, tuple[list[str], str]] = {
    "one letter": (["a" * 1000 + chr(100 + index) * 24 for index in range(16)], "a"),
    "alternating": ([("ab" * 512)[:1022] + chr(100 + index) * 2 for index in range(16)], "ab"),
    "different": (["a" * 1023 + "b", *(chr(100 + index) * 1024 for index in range(15))], "a"),
}


@pytest.mark.parametrize("name", HARD)
def test_a_token_costs_about_the_same_whatever_the_stop_strings_are(name: str) -> None:
    """Counted in lines of Python, not in time, over an output that keeps long beginnings held back."""
    stops, letters = HARD[name]
    tokens = [letters * 4] * (5000 // len(letters))
    ordinary = _lines(["\n\n", "User:"], [random.Random(1).choice("xyz") * len(tokens[0])] * len(tokens))
    assert _lines(stops, tokens) <= 5 * ordinary


def test_without_stops_a_token_costs_the_same_however_long_it_is() -> None:
    assert _lines([], ["x" * 500] * 20) == _lines([], ["x"] * 20)


def test_the_largest_request_has_an_automaton_of_a_few_bytes_a_character() -> None:
    """16 strings of 1,024 characters each; hardly an edge needs a dictionary."""
    stops = ["a" + chr(100 + index) * 1023 for index in range(16)]
    tracemalloc.start()
    try:
        automaton = StopAutomaton(stops)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(automaton.depth) == 2 + 16 * 1023
    assert size <= 32 * len(automaton.depth)


def _lines(stops: list[str], tokens: list[str]) -> int:
    """The number of lines that the pushes of these tokens execute."""
    watch = StopStrings(stops)
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for token in tokens:
            watch.push(token)
    finally:
        sys.settrace(before)
    assert not watch.stopped
    return count


def test_automatons_that_are_kept_are_bounded_in_bytes() -> None:
    """The last of a dozen requests with the most and longest strings has its automaton kept, the first one
    has not."""
    draw = random.Random(0)
    requests = [tuple("".join(draw.choices("abcdefgh", k=1024)) for _ in range(16)) for _ in range(12)]
    automatons = [automaton_of(stops) for stops in requests]
    assert automaton_of(requests[-1]) is automatons[-1]
    assert automaton_of(requests[0]) is not automatons[0]
    assert automaton_of(("ab", "b")) is automaton_of(("ab", "b"))
