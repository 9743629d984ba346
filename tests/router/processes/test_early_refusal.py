"""Processes of one router refuse what would be late behind all that waits in any of them."""

from __future__ import annotations

import math

import pytest

from services.router.processes.sibling_view import SiblingView
from services.router.request.slo import Slo
from services.router.workers import backlog
from services.router.workers.backlog import Prompt, Queued, SecondsByLength
from services.router.workers.recent_work import Turnover
from tests.router.placement.modelled_cluster import Served
from tests.router.placement.test_mixed_prompts import MIXED, SHORT, in_time, let_in, served
from tests.router.processes.modelled_processes import SECONDS, TwoProcesses, serve
from tests.support.fewer import WITHOUT_THE_RULE


@WITHOUT_THE_RULE
@pytest.mark.parametrize("first_share", [pytest.param(0.5, marks=pytest.mark.slow), 0.25])
def test_early_refusal_counts_what_waits_in_the_other_process(
    first_share: float, monkeypatch: pytest.MonkeyPatch, ablated: bool
) -> None:
    """Twice what one prefill worker sustains. By its own queue each process would let in twice as many as are
    served in time, and refuse them when they are late."""
    slo, sustained = Slo(0.5, 0.012), 36

    def let_in_and_refused() -> list[Served]:
        first, second = serve(("prefill", "decode"), 2 * sustained, slo, first_share, refuse_late=True)
        return [*first, *second]

    found = let_in_and_refused()
    accepted = [one for one in found if one.refused_s is None]
    assert sum(one.meets(slo) for one in accepted) >= 0.98 * len(accepted)
    assert len(accepted) >= 0.9 * sustained * SECONDS
    refused = sorted(one.refused_s for one in found if one.refused_s is not None)
    assert refused[int(0.96 * len(refused))] == 0, "at once"
    if not ablated:
        return
    monkeypatch.setattr(SiblingView, "queued", Queued())
    assert sum(one.meets(slo) for one in let_in_and_refused()) < 0.6 * len(accepted)


@WITHOUT_THE_RULE
def test_slots_that_the_other_process_releases_count(monkeypatch: pytest.MonkeyPatch, ablated: bool) -> None:
    """A process that has a tenth of the requests sees few of them end, where they wait for decode; it refuses
    no more of them than the other one does."""

    def accepted() -> list[float]:
        both = serve(("prefill", "decode"), 66, Slo(0.5, 0.008), 0.1, refuse_late=True)
        return [sum(one.refused_s is None for one in each) / len(each) for each in both]

    first, second = accepted()
    assert first >= 0.9 * second
    if not ablated:
        return
    monkeypatch.setattr(Turnover, "per_second", property(lambda turnover: turnover.own))
    first, second = accepted()
    assert first <= 0.6 * second


@WITHOUT_THE_RULE
def test_short_prompts_are_not_refused_for_long_ones_of_the_other_process(
    monkeypatch: pytest.MonkeyPatch,
    ablated: bool,
) -> None:
    """The rate is one that the worker sustains, where one process refuses none either. If prompts of the
    other process all went first, short ones would wait in the queue for a long one to end."""

    def of_two_processes() -> list[tuple[int, Served]]:
        return served(MIXED, 1.0, make=lambda machines: TwoProcesses(machines, 1.0, refuse_late=True))

    found = of_two_processes()
    assert in_time(MIXED, found) >= 0.98
    assert in_time(MIXED, let_in(found)) == 1
    if not ablated:
        return
    monkeypatch.setattr(backlog, "prompts_of", as_one_short_prompt)
    short = [(tokens, one) for tokens, one in of_two_processes() if tokens == SHORT]
    assert in_time(MIXED, short) < 0.9


def as_one_short_prompt(seconds: SecondsByLength, tokens: int = 0) -> list[Prompt]:
    """Prompts of which only the sum is known, all of which go first."""
    return [Prompt(sum(seconds), tokens, math.inf, 0.0, limits_known=False)] if sum(seconds) else []
