"""Decides which rate to measure next and when to stop, without sending.

1. Bracket: short probes, each at twice the rate of the last, until one fails (or half, until one passes).
2. Refine: longer probes a little to both sides of the estimated crossing.
3. Confirm: a long probe at the rate that will be reported. If it fails, the new estimate is tried once more.

    search = Search(plan)
    while (trial := search.next()) is not None:
        search.add_probe(probe of trial, seconds that it took)
    search.result()

The plan's budget bounds the time: the actual duration of each probe is deducted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loadgen.goodput.crossing import Crossing, find_crossing
from loadgen.goodput.probe import Probe, Verdict

_BRACKET_SHARE = 1 / 30
_REFINE_SHARE = 1 / 7
_CONFIRM_SHARE = 1 / 7
_CONFIRMATIONS = 2
# A rate that needs longer than this for a few requests counts as zero.
_LONGEST_SHARE = 1 / 5
# Part of the budget for bracketing.
_MOST_BRACKETING = 0.5
_FACTOR = 2.0
# While the interval of the crossing is wider than this, probes are short and at its middle; at most
# `_MOST_SHORT`, since a noisy server needs longer ones.
_VAGUE = 1.5
_MOST_SHORT = 3
_KNOWN = 1.2
_ASIDE = 0.03
_FEWEST_REQUESTS = 10


class Phase(StrEnum):
    """The purpose of a trial."""

    BRACKET = "bracket"
    REFINE = "refine"
    CONFIRM = "confirm"


class Finding(StrEnum):
    """The result of a search for the highest rate."""

    FOUND = "found"
    NOTHING = "nothing was measured"
    # Even the lowest rate misses the limits.
    NONE = "no rate holds the limits"
    # Even the highest rate meets the limits.
    BEYOND = "holds at the highest rate tried"


@dataclass(frozen=True, slots=True)
class Trial:
    """The next measurement of a search."""

    rate: float
    seconds: float
    phase: Phase


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """Goal, start and budget of a search; rates in requests per second."""

    goal: float
    start: float
    budget_s: float
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result. `crossing` is None unless it was found; `confirmed` is the probe that met the goal, or may
    have, at that rate."""

    finding: Finding
    crossing: Crossing | None
    confirmed: Probe | None
    probes: tuple[Probe, ...]


class Search:
    """A search for the goodput, rate by rate; `add_probe` or `skip` must follow each `next`."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._left = plan.budget_s
        self._probes: list[Probe] = []
        self._confirmed: Probe | None = None
        self._confirmations = 0
        self._refined = 0
        self._phase = Phase.BRACKET

    def next(self) -> Trial | None:
        """The next trial; None when the search is over."""
        if self._confirmed is not None or self._confirmations == _CONFIRMATIONS or self._left <= 0:
            return None
        if self._phase is Phase.BRACKET and (trial := self._bracket()) is not None:
            return trial
        if not self._enclosed():
            return None
        crossing = find_crossing(self._probes, self._plan.goal)
        confirming = self._plan.budget_s * _CONFIRM_SHARE
        if self._phase is not Phase.CONFIRM and self._left > _CONFIRMATIONS * confirming * 1.1:
            self._phase = Phase.REFINE
            return self._refine(crossing, self._left - _CONFIRMATIONS * confirming)
        self._phase = Phase.CONFIRM
        last = self._confirmations + 1 == _CONFIRMATIONS
        seconds = self._left if last else min(self._left, confirming)
        return Trial(self._within(crossing.rate), seconds, Phase.CONFIRM)

    def add_probe(self, probe: Probe, took_s: float) -> None:
        """Reports the result of the last trial."""
        self._left -= took_s
        self._probes.append(probe)
        if self._phase is Phase.CONFIRM:
            self._confirmations += 1
            if probe.verdict is not Verdict.UNSTABLE and probe.high >= self._plan.goal:
                self._confirmed = probe

    def skip(self, took_s: float) -> None:
        """Reports that the last trial failed; its time is spent."""
        self._left -= took_s

    def result(self) -> Goodput:
        """Returns the result of the measurements so far."""
        probes = tuple(self._probes)
        if not probes:
            return Goodput(Finding.NOTHING, None, None, probes)
        if not any(probe.verdict is Verdict.PASS for probe in probes):
            return Goodput(Finding.NONE, None, None, probes)
        if all(probe.verdict is Verdict.PASS for probe in probes):
            return Goodput(Finding.BEYOND, None, None, probes)
        crossing = find_crossing(probes, self._plan.goal)
        return Goodput(Finding.FOUND, crossing, self._confirmed, probes)

    def _bracket(self) -> Trial | None:
        """The next rate up or down; None once there are rates on both sides, or no time or range is left."""
        if not self._probes:
            return self._short(self._within(self._plan.start))
        if self._enclosed() or self._left < self._plan.budget_s * (1 - _MOST_BRACKETING):
            return None
        if self._probes[-1].verdict is Verdict.PASS:
            rate = self._within(max(probe.rate for probe in self._probes) * _FACTOR)
        else:
            rate = min(probe.rate for probe in self._probes) / _FACTOR
        trial = self._short(rate)
        hopeless = trial.seconds > self._plan.budget_s * _LONGEST_SHARE
        return None if hopeless or any(probe.rate == rate for probe in self._probes) else trial

    def _short(self, rate: float) -> Trial:
        """A short probe, long enough for a few requests."""
        seconds = max(self._plan.budget_s * _BRACKET_SHARE, _FEWEST_REQUESTS / rate)
        return Trial(rate, min(self._left, seconds), Phase.BRACKET)

    def _refine(self, crossing: Crossing, left: float) -> Trial:
        self._refined += 1
        long = crossing.width < _VAGUE or self._refined > _MOST_SHORT
        share = _REFINE_SHARE if long else _BRACKET_SHARE
        rate = crossing.rate
        if crossing.width < _KNOWN:
            rate *= 1 + _ASIDE if len(self._probes) % 2 else 1 - _ASIDE
        return Trial(self._within(rate), min(left, self._plan.budget_s * share), Phase.REFINE)

    def _enclosed(self) -> bool:
        passed = [probe.verdict is Verdict.PASS for probe in self._probes]
        return any(passed) and not all(passed)

    def _within(self, rate: float) -> float:
        return rate if self._plan.highest is None else min(rate, self._plan.highest)
