"""A burst of streams measures the time between tokens while all of them decode, and nothing else."""

from __future__ import annotations

import pytest

from bench.cluster.clients import Stream, Together


def streams(joins: list[float], step: float, tokens: int) -> list[Stream]:
    """The first token a little before; 5 ms a token while a prompt is still prefilled, then `step`."""
    all_in = max(joins)
    found = []
    for join in joins:
        came = [join - 0.5, join]
        while len(came) < tokens:
            came.append(came[-1] + (0.005 if came[-1] < all_in else step))
        found.append(Stream(0.25, came))
    return found


def test_only_what_comes_while_all_decode_counts() -> None:
    together = Together(100, streams([1.0, 1.2, 1.5], 0.01, 300))
    begin, end = together.window
    assert begin == pytest.approx(1.5 + 4 * 0.01)
    assert end == pytest.approx(min(stream.came[-1] for stream in together.streams))
    found = together.figures()
    assert found["tpot_ms"] == pytest.approx(10)
    assert found["itl_p99_ms"] == pytest.approx(10)
    assert (found["streams"], found["prompt"]) == (3, 100)
    # The first joined 100 tokens before the last, which is 5 when the window begins.
    assert found["mean_context"] == pytest.approx(100 + (0 + 60 + 100) / 3 + 5 + found["tokens"] / 6, abs=3)
    assert found["burst_ttft_max_ms"] == pytest.approx(750)


def test_streams_that_never_decode_together_are_refused() -> None:
    with pytest.raises(RuntimeError, match="longer outputs"):
        Together(100, streams([1.0, 3.0], 0.01, 60)).figures()
