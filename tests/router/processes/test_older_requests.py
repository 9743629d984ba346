"""Processes of one router leave room to older requests that wait in another one."""

from __future__ import annotations

from functools import partial

import pytest

from services.router.request.slo import Slo
from services.router.workers.other_claims import SiblingCounts
from services.router.workers.recent_mean import RecentMean
from tests.router.processes.modelled_processes import serve
from tests.support.fewer import WITHOUT_THE_RULE


def shares(
    roles: tuple[str, ...], rate: float, slo: Slo, first_share: float, first_ratio: float = 1.0
) -> tuple[float, float]:
    """The share of the requests in time of each process; the arguments are those of `serve`."""
    served = serve(roles, rate, slo, first_share, first_ratio)
    first, second = (sum(one.meets(slo) for one in each) / len(each) for each in served)
    return first, second


@WITHOUT_THE_RULE
@pytest.mark.parametrize(
    ("roles", "rate", "tpot_s"),
    [
        (("prefill", "decode"), 38, 0.008),
        pytest.param(("prefill", "both"), 43, 0.012, marks=pytest.mark.slow),
    ],
    ids=["room-of-decode", "room-of-prefill"],
)
def test_a_process_with_fewer_requests_does_not_starve(
    roles: tuple[str, ...], rate: float, tpot_s: float, monkeypatch: pytest.MonkeyPatch, ablated: bool
) -> None:
    """Room appears where a request ends: the process with most requests sees it first, and there others wait,
    too. Whichever process a client has reached, its requests are in time."""
    slo = Slo(0.5, tpot_s)
    found = shares(roles, rate, slo, 0.7)
    assert min(found) >= 0.88, found
    if not ablated:
        return
    monkeypatch.setattr(SiblingCounts, "waiting_before", lambda counts, precedence: 0)
    assert min(shares(roles, rate, slo, 0.7)) < min(found) - 0.05


@WITHOUT_THE_RULE
def test_a_process_that_predicts_longer_steps_does_not_starve(
    monkeypatch: pytest.MonkeyPatch, ablated: bool
) -> None:
    """The process sees no room where the other one does, places little, and by itself would learn little of
    what tokens take now."""
    unequal = partial(shares, ("prefill", "decode"), 34, Slo(0.5, 0.008), 0.2, 1.03)
    found = unequal()
    assert min(found) >= 0.88, found
    if not ablated:
        return
    monkeypatch.setattr(RecentMean, "take", lambda mean, sibling, reported: None)
    assert min(unequal()) < min(found) - 0.1
