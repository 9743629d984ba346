"""The steady window, on servers whose state is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loadgen.analysis.steady import Steadiness, backlog_at, find_window, judge_window
from tests.loadgen.goodput.queues import MG1

Floats = NDArray[np.float64]
ONE = MG1((0.01,), (1.0,), 1.0)


def poisson(rate: float, seconds: float, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    return np.cumsum(random.exponential(1 / rate, int(rate * seconds)))


@pytest.mark.parametrize(("load", "seconds"), [(0.3, 20.0), (0.8, 20.0), (0.9, 100.0)])
def test_a_server_below_its_capacity_is_steady(load: float, seconds: float) -> None:
    found = [find_window(*ONE.run(load * 100, seconds, seed)[:2]).steadiness for seed in range(30)]
    assert found.count(Steadiness.STEADY) >= 28


@pytest.mark.parametrize(("load", "seconds"), [(1.3, 20.0), (1.1, 100.0), (2.0, 10.0)])
def test_a_server_past_its_capacity_is_growing(load: float, seconds: float) -> None:
    found = [find_window(*ONE.run(load * 100, seconds, seed)[:2]) for seed in range(30)]
    assert [window.steadiness for window in found].count(Steadiness.GROWING) >= 28
    for window in found:
        # What comes and is not served.
        assert window.growth == pytest.approx((load - 1) * 100 * window.seconds, rel=0.4)


def test_the_warm_up_is_cut() -> None:
    """A server that takes 2 s a request for its first 20 s, and 0.2 s then."""
    due = poisson(20.0, 120.0, 1)
    latency = np.where(due < 20.0, 2.0, 0.2)
    window = find_window(due, due + latency)
    assert 19.0 <= window.since <= 30.0
    assert window.until == due[-1]
    assert window.steadiness is Steadiness.STEADY
    assert window.backlog == pytest.approx(4.0, rel=0.15)


def test_the_window_waits_until_as_many_ended_as_are_under_way() -> None:
    """500 at once in the server: before the first 500 ended, it was not full."""
    due = poisson(100.0, 60.0, 2)
    window = find_window(due, due + 5.0)
    assert window.since >= 9.0
    assert window.backlog == pytest.approx(500, rel=0.1)


def test_a_server_that_slows_down_is_not_steady() -> None:
    due = poisson(20.0, 100.0, 3)
    window = find_window(due, due + 0.2 + 0.05 * due)
    assert window.steadiness is not Steadiness.STEADY


def test_a_server_that_warms_up_all_the_time_is_not_steady() -> None:
    due = poisson(50.0, 100.0, 4)
    window = judge_window(due, due + 4.0 - 0.038 * due, 0.0, 100.0)
    assert window.steadiness is Steadiness.MOVING
    assert window.growth < 0


def test_too_few_to_tell() -> None:
    due = np.arange(12.0)
    assert find_window(due, due + 0.5).steadiness is Steadiness.SHORT
    assert find_window(np.array([]), np.array([])).steadiness is Steadiness.SHORT


def test_a_load_that_changes_is_taken_whole() -> None:
    due = np.sqrt(np.linspace(0, 10_000, 4000))
    window = find_window(due, due + 1.0, stationary=False)
    assert (window.since, window.until) == (due[0], due[-1])
    assert window.steadiness is Steadiness.SHORT


def test_requests_that_never_end_stay_in_the_backlog() -> None:
    due = np.arange(0.0, 100.0, 0.1)
    ended = np.where(np.arange(1000) % 10 == 0, np.inf, due + 0.1)
    assert find_window(due, ended).steadiness is Steadiness.GROWING


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=200),
    st.booleans(),
)
def test_a_window_lies_within_its_run(requests: list[tuple[float, float]], stationary: bool) -> None:
    due = np.sort(np.array([one[0] for one in requests]))
    ended = due + np.array([one[1] for one in requests])
    window = find_window(due, ended, stationary=stationary)
    assert due[0] <= window.since <= window.until <= due[-1]
    assert window.backlog >= 0
    counted = backlog_at(np.array([due[-1]]), due, ended)[0]
    assert counted == (ended > due[-1]).sum()
