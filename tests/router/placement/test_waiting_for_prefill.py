"""A prompt waits for the worker that is best for all, rather than go to one that decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from services.router.placement.claim import Claim
from services.router.placement.placement import NoRoom, Placement
from services.router.placement.room import STUCK_S
from services.router.placement.worker_order import PrefillOrder
from services.router.request.slo import Slo
from services.router.workers.backlog import Backlog
from services.router.workers.worker import Worker
from tests.router.placement.modelled_cluster import COSTS
from tests.router.processes.modelled_processes import serve
from tests.router.workers.bare_workers import bare_worker, placement_of
from tests.support.fewer import WITHOUT_THE_RULE


def _the_first_that_starts_soon(
    placement: Placement,
    decode: Worker,
    among: Iterable[Worker],
    order: Callable[[Worker], PrefillOrder],
    soon: Callable[[Worker], bool],
) -> Worker | None:
    return min(filter(soon, among), key=order, default=None)


@WITHOUT_THE_RULE
@pytest.mark.parametrize(
    ("roles", "tpot_s", "rate"),
    [
        (("prefill", "prefill", "both", "both"), 0.012, 84),
        pytest.param(("both",) * 4, 0.008, 68, marks=pytest.mark.slow),
    ],
    ids=["conditional", "exchange"],
)
def test_prompts_wait_rather_than_delay_what_others_decode(
    roles: tuple[str, ...], tpot_s: float, rate: float, monkeypatch: pytest.MonkeyPatch, ablated: bool
) -> None:
    """Two decode, and neither computes prompts for the other one while the queues of those that do so for all
    are full. In virtual time."""
    slo = Slo(0.5, tpot_s)

    def share() -> float:
        served = [one for each in serve(roles, rate, slo, 0.5, seconds=6) for one in each]
        return sum(one.meets(slo) for one in served) / len(served)

    assert share() >= 0.97
    if not ablated:
        return
    monkeypatch.setattr(Placement, "prefill_for", _the_first_that_starts_soon)
    assert share() <= 0.9


def test_none_waits_for_a_worker_that_has_stopped_to_compute_prompts() -> None:
    now = [0.0]
    prefill, both = bare_worker("prefill-0"), bare_worker("both-0", receives_handoffs=True, slots=64)
    for worker in (prefill, both):
        worker.costs = COSTS
    prefill.backlog, both.claimed_slots = Backlog(lambda: now[0]), 20
    placement = placement_of([prefill, both], ahead=1000)
    first = placement.pick(1024, 128)
    assert isinstance(first, Claim)
    second = placement.pick(1024, 128)  # one is sent after it
    assert isinstance(second, Claim)
    assert {first.prefill, second.prefill} == {prefill}
    assert placement.pick(1024, 128) is NoRoom.PREFILL, "20 sequences would wait for the prompt"
    now[0] = prefill.backlog.wait_s + STUCK_S + 0.01
    third = placement.pick(1024, 128)
    assert isinstance(third, Claim)
    assert third.prefill is both
