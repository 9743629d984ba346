"""Times when requests are sent, against the definitions of the processes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from loadgen.common.errors import LoadgenError
from loadgen.load.arrivals import Stage, arrivals, steady, unit_times

SIGNIFICANCE = 0.001


def take(rate: float, burstiness: float, count: int, seed: int = 3) -> np.ndarray:
    return np.array(list(itertools.islice(arrivals(steady(rate), burstiness, seed), count)))


def test_poisson_passes_a_distribution_test() -> None:
    times = take(20.0, 1.0, 20_000)
    assert times[0] == 0.0
    gaps = np.diff(times)
    assert stats.kstest(gaps, stats.expon(scale=1 / 20).cdf).pvalue > SIGNIFICANCE
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / math.sqrt(len(gaps))
    # Counts of a second are Poisson: as large a variance as mean.
    counts = np.histogram(times, np.arange(0, int(times[-1])))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 2.0, 10.0])
def test_gamma_passes_a_distribution_test(burstiness: float) -> None:
    gaps = np.diff(take(5.0, burstiness, 20_000))
    expected = stats.gamma(burstiness, scale=1 / (5.0 * burstiness))
    assert stats.kstest(gaps, expected.cdf).pvalue > SIGNIFICANCE
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)


def test_the_test_can_tell() -> None:
    """Gamma gaps are not taken for exponential ones."""
    gaps = np.diff(take(20.0, 1.3, 20_000))
    assert stats.kstest(gaps, stats.expon(scale=1 / 20).cdf).pvalue < 1e-6


def test_an_infinite_burstiness_is_a_metronome() -> None:
    assert take(4.0, math.inf, 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_seeds() -> None:
    assert take(1.0, 1.0, 50, seed=1).tolist() == take(1.0, 1.0, 50, seed=1).tolist()
    assert take(1.0, 1.0, 50, seed=1).tolist() != take(1.0, 1.0, 50, seed=2).tolist()


@pytest.mark.parametrize("text", ["40:5-50", "40:50-5", "40:5~50", "40:50~5", "40:20"])
def test_a_stage_has_its_rate(text: str) -> None:
    """Times mapped back through the integral of the rate are a Poisson process of rate 1."""
    stage = Stage.parse(text)
    times = np.array(list(arrivals([stage], 1.0, 5)))
    assert times[-1] < stage.seconds
    assert len(times) == pytest.approx(stage.expected, abs=4 * math.sqrt(stage.expected))
    times_of_rate = np.linspace(0, stage.seconds, 20_001)
    shape = times_of_rate / stage.seconds
    rate = (
        stage.first * (stage.last / stage.first) ** shape
        if stage.exponential
        else stage.first + (stage.last - stage.first) * shape
    )
    integral = np.concatenate([[0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(times_of_rate))])
    gaps = np.diff(np.interp(times, times_of_rate, integral))
    assert stats.kstest(gaps, stats.expon.cdf).pvalue > SIGNIFICANCE


def test_stages_follow_each_other() -> None:
    times = np.array(
        list(arrivals([Stage.parse("10:0"), Stage.parse("10:10"), Stage.parse("5:100")], 1.0, 1))
    )
    in_each = np.histogram(times, [0, 10, 20, 25])[0]
    assert in_each[0] <= 1  # the first of all is at once
    assert in_each[1] == pytest.approx(100, abs=40)
    assert in_each[2] == pytest.approx(500, abs=90)


@given(
    st.lists(
        st.builds(Stage, st.floats(0.1, 50), st.floats(0.1, 40), st.floats(0.1, 40), st.booleans()),
        max_size=4,
    ),
    st.floats(0.1, 20),
    st.integers(0, 2**32),
)
def test_times_ascend_within_their_stages(stages: list[Stage], burstiness: float, seed: int) -> None:
    times = list(itertools.islice(arrivals(stages, burstiness, seed), 500))
    assert times == sorted(times)
    assert all(0 <= time <= sum(stage.seconds for stage in stages) * (1 + 1e-9) for time in times)


@given(st.floats(0.1, 1000), st.floats(0.1, 1000), st.floats(0.1, 100), st.booleans(), st.floats(0, 1))
def test_when_inverts_the_integral(
    first: float, last: float, seconds: float, exponential: bool, share: float
) -> None:
    stage = Stage(seconds, first, last, exponential)
    when = stage.when(share * stage.expected)
    at = (
        first * (last / first) ** (when / seconds) if exponential else first + (last - first) * when / seconds
    )
    sent = Stage(when, first, at, exponential).expected if when > 0 else 0.0
    assert sent == pytest.approx(share * stage.expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("text", ["", "5", "5:", "x:1", "0:5", "5:0~3", "5:1-2-3", "-5:1"])
def test_what_is_no_stage(text: str) -> None:
    with pytest.raises(LoadgenError):
        Stage.parse(text)


def test_unit_times_have_rate_one() -> None:
    assert list(itertools.islice(unit_times(1.0, 0), 5000))[-1] == pytest.approx(5000, rel=0.06)
