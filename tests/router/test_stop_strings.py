"""Stop strings: the cut does not depend on how the text was divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.stop_strings import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first prefix that ends with a stop string, without the longest one it ends with."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


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
def test_nothing_of_a_stop_string_goes_out_early(text: str, stops: list[str]) -> None:
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


def test_without_stops_nothing_is_held() -> None:
    watch = StopStrings(())
    assert watch.push("abc") == "abc"
    assert watch.flush() == ""
