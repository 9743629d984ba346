"""The search against queues whose goodput is known by formula, in virtual time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.analysis.steady import Steadiness
from loadgen.goodput.crossing import find_crossing
from loadgen.goodput.probe import Probe, Verdict
from loadgen.goodput.search import Finding, Goodput, Phase, Search, SearchPlan
from tests.loadgen.goodput.queues import CLIFF, LOOSE, MD1, MG1, MIXED, Queue, goodput

BUDGET_S = 480.0
QUEUES: dict[str, Queue] = {"M/D/1": MD1, "M/G/1": MIXED, "M/D/1 at its capacity": LOOSE, "cliff": CLIFF}


def search(
    queue: Queue, seed: int, *, goal: float = 0.9, start: float = 1.0, budget_s: float = BUDGET_S
) -> Goodput:
    """A whole search in virtual time; its own time must not pass its budget."""
    search = Search(SearchPlan(goal, start, budget_s))
    spent, number = 0.0, 0
    while (trial := search.next()) is not None:
        number += 1
        probe = Probe.of(trial.rate, goal, *queue.run(trial.rate, trial.seconds, seed * 1000 + number))
        search.add_probe(probe, trial.seconds)
        spent += trial.seconds
    assert spent <= budget_s * (1 + 1e-9)
    return search.result()


def found_within(queue: Queue, seeds: range, goal: float = 0.9) -> tuple[int, int]:
    """The number of searches that ended within 5 % of the truth, and of intervals that hold it."""
    truth = goodput(queue, goal)
    near = held = 0
    for seed in seeds:
        crossing = search(queue, seed, goal=goal).crossing
        assert crossing is not None
        near += abs(crossing.rate / truth - 1) <= 0.05
        held += crossing.low <= truth <= crossing.high
    return near, held


@pytest.mark.parametrize("name", QUEUES)
def test_finds_the_goodput_of_a_queue(name: str) -> None:
    near, held = found_within(QUEUES[name], range(8))
    assert near >= 7
    assert held >= 6


@pytest.mark.slow
@pytest.mark.parametrize("name", QUEUES)
def test_finds_the_goodput_in_90_of_100_seeds(name: str) -> None:
    """The results are as near as the search promises, and intervals hold the truth about as often as they
    say."""
    near, held = found_within(QUEUES[name], range(100))
    print(f"{name}: {near} of 100 within 5 %, {held} of 100 intervals hold the truth")
    assert near >= 90
    assert held >= 85


@pytest.mark.slow
def test_finds_the_goodput_at_99_percent() -> None:
    near, held = found_within(MD1, range(100), goal=0.99)
    print(f"99 %: {near} of 100 within 5 %, {held} of 100 intervals hold the truth")
    assert near >= 90
    assert held >= 85


def test_the_truth_of_the_queues() -> None:
    """M/M/1's formula, by a service of many lengths; and M/D/1's own, Crommelin's."""
    lengths = tuple(
        np.quantile(np.random.default_rng(1).exponential(1.0, 100_000), np.linspace(0.005, 0.995, 100))
    )
    exponential = MG1(lengths, (0.01,) * 100, 6.0)
    load = 0.6
    rate = load / exponential.mean
    assert exponential.attainment(rate) == pytest.approx(
        1 - math.exp(-(1 - load) * 6.0 / exponential.mean), abs=0.01
    )
    waits = sum((load * (k - 3)) ** k / math.factorial(k) * math.exp(-load * (k - 3)) for k in range(4))
    assert MG1((1.0,), (1.0,), 4.0).attainment(load) == pytest.approx((1 - load) * waits, abs=0.005)
    due, ended, good = MD1.run(70.0, 2000.0, 1)
    assert good.mean() == pytest.approx(MD1.attainment(70.0), abs=0.01)
    assert (ended >= due).all()


def test_a_search_starts_anywhere() -> None:
    truth = goodput(MD1, 0.9)
    for start in (0.5, 40.0, 900.0):
        crossing = search(MD1, 3, start=start).crossing
        assert crossing is not None
        assert crossing.rate == pytest.approx(truth, rel=0.06)


def test_a_search_confirms_and_keeps_its_curve() -> None:
    result = search(MD1, 1)
    assert result.finding is Finding.FOUND
    assert result.crossing is not None
    assert result.confirmed is result.probes[-1]
    assert result.confirmed.rate == pytest.approx(result.crossing.rate, rel=0.05)
    assert result.confirmed.seconds > 35
    assert {probe.verdict for probe in result.probes} >= {Verdict.PASS, Verdict.UNSTABLE}


def test_nothing_holds() -> None:
    result = search(MG1((1.0,), (1.0,), 0.5), 1)
    assert (result.finding, result.crossing) == (Finding.NONE, None)
    assert len(result.probes) >= 2


def test_everything_holds_up_to_the_highest_rate() -> None:
    found = Search(SearchPlan(0.9, 1.0, 100.0, highest=20.0))
    rates = []
    while (trial := found.next()) is not None:
        rates.append(trial.rate)
        due = np.linspace(0, trial.seconds, int(trial.rate * trial.seconds) + 50)
        found.add_probe(Probe.of(trial.rate, 0.9, due, due + 0.1, np.ones(len(due), np.bool_)), trial.seconds)
    assert found.result().finding is Finding.BEYOND
    assert max(rates) == 20.0
    assert rates.count(20.0) == 1


def test_an_overrun_takes_from_the_rest() -> None:
    found = Search(SearchPlan(0.9, 10.0, 100.0))
    first = found.next()
    assert first is not None
    found.add_probe(Probe.of(10.0, 0.9, *MD1.run(10.0, first.seconds, 1)), 99.0)
    assert found.next() is None


def test_phases_come_in_their_order() -> None:
    found = Search(SearchPlan(0.9, 20.0, 200.0))
    phases = []
    while (trial := found.next()) is not None:
        phases.append(trial.phase)
        found.add_probe(
            Probe.of(trial.rate, 0.9, *MD1.run(trial.rate, trial.seconds, len(phases))), trial.seconds
        )
    assert phases == sorted(phases, key=list(Phase).index)
    assert phases[-1] is Phase.CONFIRM
    assert phases.count(Phase.CONFIRM) in (1, 2)


def test_a_rate_that_does_not_hold_is_not_confirmed() -> None:
    """A server that breaks once the search has settled: tried twice, and reported."""
    found = Search(SearchPlan(0.9, 20.0, 200.0))
    confirming: list[float] = []
    while (trial := found.next()) is not None:
        due, ended, good = MD1.run(trial.rate, trial.seconds, len(confirming))
        if trial.phase is Phase.CONFIRM:
            confirming.append(trial.rate)
            good = np.zeros_like(good)
        found.add_probe(Probe.of(trial.rate, 0.9, due, ended, good), trial.seconds)
    assert len(confirming) == 2
    assert confirming[1] < confirming[0]
    assert found.result().confirmed is None


def test_a_backlog_that_grows_is_unstable_however_good_it_looks() -> None:
    """The backlog grows at 110 % of the capacity, but a short look sees most requests within a loose
    limit."""
    loose = MG1((0.01,), (1.0,), 10.0)
    probe = Probe.of(110.0, 0.9, *loose.run(110.0, 60.0, 1))
    assert probe.attainment > 0.95
    assert probe.verdict is Verdict.UNSTABLE


def probe(rate: float, share: float, draws: float = 100.0, verdict: Verdict | None = None) -> Probe:
    reported = verdict or (Verdict.PASS if share >= 0.9 else Verdict.FAIL)
    return Probe(rate, rate, 10.0, int(draws), share, draws, 0.0, 1.0, Steadiness.STEADY, reported)


@given(
    st.floats(0.5, 200.0),
    st.floats(4.0, 60.0),
    st.lists(st.floats(0.6, 1.5), min_size=4, max_size=12, unique=True),
)
def test_the_crossing_of_an_exact_curve(truth: float, steepness: float, places: list[float]) -> None:
    """Probes that lie on the assumed curve give its crossing, where some are near it on each side."""
    places = [*places, 0.9, 1.1]

    def share(rate: float) -> float:
        return 1 / (1 + math.exp(-(math.log(9) - steepness * math.log(rate / truth))))

    crossing = find_crossing([probe(p * truth, share(p * truth), 3000.0) for p in places], 0.9)
    assert crossing.rate == pytest.approx(truth, rel=0.03)
    assert crossing.low <= crossing.rate <= crossing.high


def test_a_cliff_lies_between_what_passed_and_what_failed() -> None:
    crossing = find_crossing([probe(10, 1.0), probe(11, 1.0), probe(12, 0.0), probe(20, 0.0)], 0.9)
    assert 10.9 < crossing.low < crossing.rate < crossing.high < 12.1


def test_a_probe_lies_where_its_arrivals_were() -> None:
    """Meant for 10/s, the probe that failed saw 12/s by chance: that says nothing against 10/s."""
    passed, failed = probe(9, 1.0), probe(10, 0.2)
    unlucky = dataclasses.replace(failed, offered=12.0)
    assert find_crossing([passed, failed], 0.9).rate < 10
    assert find_crossing([passed, unlucky], 0.9).rate > 10
    due, ended, good = MD1.run(50.0, 20.0, 7)
    reported = Probe.of(50.0, 0.9, due, ended, good)
    assert reported.offered == pytest.approx((len(due) - 1) / (due[-1] - due[0]))
    assert reported.offered != 50.0


def test_more_probes_make_the_interval_smaller() -> None:
    few = [probe(9, 0.95, 50), probe(11, 0.85, 50)]
    assert find_crossing(few * 8, 0.9).width < find_crossing(few, 0.9).width


def test_an_unstable_probe_pulls_down_whatever_it_attained() -> None:
    passed: list[Any] = [probe(9, 0.99), probe(10, 0.97)]
    fooled = find_crossing([*passed, probe(11, 0.96)], 0.9)
    reported = find_crossing([*passed, probe(11, 0.96, verdict=Verdict.UNSTABLE)], 0.9)
    assert reported.rate < fooled.rate
    assert reported.rate < 11.5


def test_the_rate_of_conversations_is_that_of_those_that_began() -> None:
    """100 begin within ten seconds; the second turns of the last ones are due twenty seconds later."""
    starts = np.linspace(0.0, 10.0, 101)
    due = np.sort(np.concatenate([starts, starts + 20.0]))
    met = np.ones(len(due), np.bool_)
    assert Probe.of(20.0, 0.9, due, due + 0.1, met, starts).offered == pytest.approx(20.0)
    assert Probe.of(20.0, 0.9, due, due + 0.1, met).offered == pytest.approx(201 / 30)
