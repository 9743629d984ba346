"""The search for a limit, against limits that are known."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cluster.highest_rate import STEP, highest
from bench.machine import spread_out


@given(st.floats(0.7, 300.0))
def test_a_limit_lies_between_what_holds_and_the_next(limit: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    best, beyond = highest(10.0, holds)
    assert best is not None
    assert beyond is not None
    assert best <= limit < beyond
    assert beyond / best == pytest.approx(STEP)
    assert len(tried) == len(set(tried))
    # One look at the start, one for each doubling from there, and two to refine.
    assert len(tried) <= 4 + math.ceil(abs(math.log(limit / 10.0, STEP**3)))


def test_nothing_holds_and_everything_does() -> None:
    best, beyond = highest(10.0, lambda rate: False)
    assert best is None
    assert beyond is not None
    assert beyond < 1.0
    best, beyond = highest(10.0, lambda rate: True)
    assert beyond is None
    assert best is not None
    assert best > 10_000.0


def test_processors_are_of_different_cores_while_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 6, 7})
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: str(int(re.findall(r"cpu(\d+)/", str(path))[0]) // 2))
    assert spread_out(4) == [0, 2, 6, 1]
    with pytest.raises(ValueError, match="7 processors are wanted and 6 are here"):
        spread_out(7)
