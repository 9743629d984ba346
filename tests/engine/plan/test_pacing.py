"""Prefill steps beside decode steps in virtual time: the mean step keeps the limit, prompts get the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from baton.engine.plan.pacing import PrefillPacing

# A prefill step, and a decode step alone and beside one, in seconds.
PREFILL, ALONE, BESIDE = 0.024, 0.005, 0.009


@dataclass
class Worker:
    """A GPU that always has prompts and sequences."""

    limit_s: float
    now: float = 0.0

    def run(self, seconds: float, *, decoding: bool = True) -> tuple[float, float]:
        """The mean decode step, and the share of the time with prefill steps."""
        pacing = PrefillPacing(lambda: self.limit_s)
        steps, prefilled, until, begun_at = 0, 0.0, 0.0, self.now
        while self.now < begun_at + seconds:
            pacing.look(self.now, steps, decoding=decoding)
            if self.now >= until and pacing.may_begin(self.now):
                pacing.begun(self.now, PREFILL)
                until = self.now + PREFILL
                prefilled += PREFILL
            self.now += BESIDE if self.now < until else ALONE
            steps += decoding
        return (self.now - begun_at) / max(1, steps), prefilled / (self.now - begun_at)


@pytest.mark.parametrize("tokens", [1.0, 2.1])
def test_a_step_earns_by_the_tokens_that_it_gives_a_sequence(tokens: float) -> None:
    """Steps last two limits each."""
    pacing = PrefillPacing(lambda: 0.005, tokens_a_step=lambda: tokens)
    for steps in range(11):
        pacing.look(steps * 0.01, steps, decoding=True)
    pacing.begun(0.1, 1.0)
    assert pacing.may_begin(0.1) is (tokens > 2)


@pytest.mark.parametrize("limit_ms", [6.0, 6.5, 7.0, 8.0])
def test_the_mean_step_keeps_the_limit_and_prompts_get_what_it_leaves(limit_ms: float) -> None:
    step, share = Worker(limit_ms / 1e3).run(20)
    assert step <= limit_ms / 1e3 * 1.01
    # The share of steps beside prefill; a prefill step ends within a decode step, so a little more is lost.
    most = (limit_ms / 1e3 - ALONE) / (BESIDE - ALONE) * BESIDE / (limit_ms / 1e3)
    assert 0.8 * most <= share <= 1.02 * most


@pytest.mark.parametrize(("limit_s", "decoding"), [(math.inf, True), (0.012, True), (0.006, False)])
def test_nothing_is_held_back_at_loose_limits_or_without_streams(limit_s: float, *, decoding: bool) -> None:
    _, share = Worker(limit_s).run(5, decoding=decoding)
    assert share > 0.85


@dataclass
class Mixing:
    """A GPU that always has prompts and sequences, whose decode steps are part of prefill steps."""

    limit_s: float
    all_limited: bool = True
    now: float = 0.0
    # How many steps of each kind have ended, and prefill steps that ran behind another one.
    prefills: int = 0
    steps: int = 0
    behind: int = 0

    def run(self, seconds: float) -> float:
        """The mean time from one token to the next."""
        pacing = PrefillPacing(lambda: self.limit_s, lambda: self.all_limited)
        while self.now < seconds:
            pacing.look(self.now, self.steps, decoding=True)
            if pacing.may_begin(self.now):
                may_follow = pacing.begun(self.now, PREFILL + ALONE)
                self._prefill()
                while may_follow and self.now < seconds:
                    self.behind += 1
                    # It is begun before the last one has ended.
                    pacing.look(self.now, self.steps - 1, decoding=True)
                    may_follow = pacing.begun(self.now, PREFILL + ALONE, behind=True)
                    self._prefill()
            self.now += ALONE
            self.steps += 1
        return self.now / self.steps

    def _prefill(self) -> None:
        self.now += PREFILL + ALONE
        self.prefills += 1
        self.steps += 1


def test_prefill_steps_that_decode_too_follow_one_another_as_the_limit_allows() -> None:
    """The credit at 20 ms pays for a few in a row; from 29 ms on all of them follow one another, and without
    a limit a decode step is between any two."""
    tight, loose, none = Mixing(0.020), Mixing(0.031), Mixing(math.inf)
    assert tight.run(20) <= 0.0203
    assert 0 < tight.behind < tight.prefills
    assert loose.run(20) == pytest.approx(PREFILL + ALONE, rel=0.02)
    assert loose.behind >= 0.98 * loose.prefills
    for alternating in (none, Mixing(0.031, all_limited=False)):
        assert alternating.run(20) == pytest.approx((PREFILL + 2 * ALONE) / 2)
        assert not alternating.behind


def test_what_was_earned_before_pays_for_few_steps_in_a_row() -> None:
    """Each step of 29 ms spends 9 more than it earns at 20 ms, and steps in a row spend four limits at
    most."""
    worker = Mixing(0.020)
    pacing = PrefillPacing(lambda: worker.limit_s)
    pacing.look(worker.now, 0, decoding=True)
    for worker.steps in range(1, 101):
        worker.now += ALONE
        pacing.look(worker.now, worker.steps, decoding=True)
    count = 0
    may_follow = pacing.begun(worker.now, PREFILL + ALONE)
    while may_follow:
        worker.now += PREFILL + ALONE
        pacing.look(worker.now, worker.steps, decoding=True)
        worker.steps += 1
        may_follow = pacing.begun(worker.now, PREFILL + ALONE, behind=True)
        count += 1
    assert count == 80 // 9 - 1


def test_at_most_32_steps_are_earned_ahead_or_owed() -> None:
    pacing = PrefillPacing(lambda: 0.010)
    pacing.look(0.0, 0, decoding=True)
    pacing.look(1.0, 1000, decoding=True)
    pacing.begun(1.0, 10.0)
    pacing.look(1.31, 1000, decoding=True)
    assert pacing.may_begin(1.31)
    pacing.look(1.33, 1000, decoding=True)
    assert not pacing.may_begin(1.33)
    pacing.look(9.0, 1000, decoding=True)
    pacing.look(9.0, 1031, decoding=True)
    assert not pacing.may_begin(9.0)
    pacing.look(9.0, 1033, decoding=True)
    assert pacing.may_begin(9.0)


def test_a_limit_that_cannot_be_met_leaves_prompts_an_eighth() -> None:
    _, share = Worker(0.003).run(20)
    assert share == pytest.approx(1 / 8, rel=0.1)


def test_streams_that_come_after_an_idle_time_owe_nothing() -> None:
    worker = Worker(0.006)
    pacing = PrefillPacing(lambda: worker.limit_s)
    pacing.look(worker.now, 0, decoding=True)
    worker.now = 5.0
    pacing.look(worker.now, 0, decoding=False)
    worker.now = 9.0
    pacing.look(worker.now, 0, decoding=False)
    assert pacing.may_begin(worker.now)
    pacing.begun(worker.now, 1.0)
    worker.now = 9.1
    pacing.look(worker.now, 10, decoding=True)
    assert not pacing.may_begin(worker.now), "ten steps of 6 ms are less than the 100 that have passed"
    worker.now = 9.11
    pacing.look(worker.now, 20, decoding=True)
    assert pacing.may_begin(worker.now)
