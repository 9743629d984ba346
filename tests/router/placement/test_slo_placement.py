"""Placement and early refusal by predicted latencies, in virtual time. Where a policy is compared, the other
one is round robin before the same workers."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from services.router.placement import forecast
from services.router.placement.claim import Claim
from services.router.placement.placement import NoRoom, Placement
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from services.router.workers.recent_mean import TpotRatio
from services.router.workers.worker import Worker
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import (
    Cluster,
    Machine,
    Machines,
    Make,
    Served,
    Traffic,
    attained,
    keep_order_of_arrival,
    simulate,
)
from tests.router.workers.bare_workers import Found, pools_of
from tests.support.fewer import WITHOUT_THE_RULE

AHEAD = 2048


class RoundRobin(Placement):
    """Each prefill and each decode worker in turn, where it has room."""

    def __init__(self, found: Found, workers: list[Worker]) -> None:
        super().__init__(found, pools_of(workers), AHEAD)
        self._workers = workers
        self._turn = itertools.count()

    def pick(self, tokens: int, max_tokens: int, *more: object, **options: object) -> Claim | NoRoom:
        prefills = [one for one in self._workers if not one.decodes and one.queued_tokens < AHEAD]
        decodes = [one for one in self._workers if one.decodes and one.free_slots > 0]
        if not prefills or not decodes:
            return NoRoom.PREFILL if decodes else NoRoom.DECODE
        turn = next(self._turn)
        return Claim(prefills[turn % len(prefills)], decodes[turn % len(decodes)], tokens, tokens)


class Heartbeats(Placement):
    """The decode worker with the most free slots and the prefill worker with the shortest queue, as they
    were at the last heartbeat."""

    def __init__(self, found: Found, workers: list[Worker]) -> None:
        super().__init__(found, pools_of(workers), AHEAD)
        self._workers = workers

    def pick(self, tokens: int, max_tokens: int, *more: object, **options: object) -> Claim | NoRoom:
        prefills = [one for one in self._workers if not one.decodes]
        decodes = [one for one in self._workers if one.decodes]
        prefill = min(prefills, key=lambda one: one.described.load.queued_prefill_tokens)
        return Claim(prefill, max(decodes, key=lambda one: one.described.load.free_slots), tokens, tokens)


class InTurn(Placement):
    """Every other prompt is computed by the worker that decodes it."""

    def __init__(self, found: Found, workers: list[Worker]) -> None:
        super().__init__(found, pools_of(workers), AHEAD)
        self._prefill, self._both = workers
        self._turn = itertools.count()

    def pick(self, tokens: int, max_tokens: int, *more: object, **options: object) -> Claim | NoRoom:
        prefill = (self._prefill, self._both)[next(self._turn) % 2]
        return Claim(prefill, self._both, tokens, tokens) if self._both.free_slots > 0 else NoRoom.DECODE


def aware(*, refuse_late: bool = False) -> Make:
    return lambda found, workers: Placement(found, pools_of(workers), AHEAD, refuse_late=refuse_late)


def of(*kinds: tuple[str, float]) -> list[Machine]:
    return [Machine(role, slower) for role, slower in kinds]


def test_slow_workers_get_what_they_can_serve_in_time() -> None:
    """One of two workers of each role takes twice as long; the limits are those of the fast ones."""

    def machines() -> list[Machine]:
        return of(("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 2))

    traffic = Traffic(24, 15, (Slo(0.3, 0.008),))
    by_risk = simulate(machines, aware(), traffic)
    in_turn = simulate(machines, RoundRobin, traffic)
    assert attained(by_risk) >= 0.95 * len(by_risk)
    assert attained(in_turn) <= 0.6 * len(in_turn)


def test_tight_and_loose_limits_do_not_share_a_worker() -> None:
    """Two decode workers hold the tight requests' limit only where most loose ones run on the other."""
    tight, loose = Slo(0.5, 0.006), Slo(0.5, 0.03)
    traffic = Traffic(36, 12, (tight, loose, loose))

    def machines() -> list[Machine]:
        return of(*[("prefill", 1.0)] * 2, *[("decode", 1.0)] * 2)

    for make, least, most in ((aware(), 0.75, 1.0), (RoundRobin, 0.0, 0.5)):
        served = simulate(machines, make, traffic)
        of_tight = [(slo, one) for slo, one in served if slo is tight]
        assert least <= attained(of_tight) / len(of_tight) <= most
        assert attained(served) - attained(of_tight) >= 0.95 * (len(served) - len(of_tight))


def apart() -> list[Machine]:
    return of(("prefill", 1), ("decode", 1))


def conditional() -> list[Machine]:
    return [Machine("prefill"), Machine("both", exchanges=True)]


def exchanging() -> list[Machine]:
    return [Machine("both", exchanges=True), Machine("both", exchanges=True)]


@pytest.mark.parametrize(
    ("machines", "slo", "peak"),
    [
        (apart, Slo(0.5, 0.006), 14),
        (conditional, Slo(0.5, 0.008), 33),
        pytest.param(conditional, Slo(0.5, 0.012), 42, marks=pytest.mark.slow),
        (exchanging, Slo(0.5, 0.012), 42),
    ],
)
def test_goodput_survives_twice_the_sustainable_rate(machines: Machines, slo: Slo, peak: float) -> None:
    """`peak` requests a second are what one pair serves in time without early refusal."""
    seconds = 9
    at_peak = simulate(machines, aware(), Traffic(peak, seconds, (slo,)))
    assert attained(at_peak) >= 0.9 * len(at_peak)
    refusing = simulate(machines, aware(refuse_late=True), Traffic(2 * peak, seconds, (slo,)))
    assert attained(refusing) >= 0.9 * attained(at_peak)
    accepted = [one for _, one in refusing if one.refused_s is None]
    assert sum(one.meets(slo) for one in accepted) >= 0.98 * len(accepted)
    refused = sorted(one.refused_s for _, one in refusing if one.refused_s is not None)
    assert refused[int(0.96 * len(refused))] == 0, "at once"
    assert refused[-1] <= slo.ttft_s, "when it is late, at the latest"  # type: ignore[operator]


@WITHOUT_THE_RULE
def test_bursts_are_smoothed_while_requests_have_time_until_their_first_token(
    monkeypatch: pytest.MonkeyPatch,
    ablated: bool,
) -> None:
    """The rate is one that a decode worker sustains on average, and not in every burst."""
    slo = Slo(0.5, 0.006)

    def share() -> float:
        served = [one for seed in range(3) for one in simulate(apart, aware(), Traffic(15, 12, (slo,), seed))]
        return attained(served) / len(served)

    assert share() >= 0.96
    if not ablated:
        return
    monkeypatch.setattr(Placement, "longest_first_token_s", lambda *arguments: 1e3)  # late from the beginning
    assert share() <= 0.92


@WITHOUT_THE_RULE
@pytest.mark.parametrize(
    ("machines", "tpot_ms", "rate"),
    [
        (apart, 6, 20),
        pytest.param(apart, 12, 50, marks=pytest.mark.slow),
        pytest.param(conditional, 12, 56, marks=pytest.mark.slow),
    ],
)
def test_under_overload_requests_that_are_late_yield(
    monkeypatch: pytest.MonkeyPatch, ablated: bool, machines: Machines, tpot_ms: float, rate: float
) -> None:
    """About a fifth more than the workers sustain, by their decode, their prompts, or both. In order of
    arrival all would wait until they are late."""
    slo = Slo(0.5, tpot_ms / 1e3)

    def served() -> list[Served]:
        return [one for _, one in simulate(machines, aware(), Traffic(rate, 10, (slo,)))]

    yielding = served()
    assert sum(one.meets(slo) for one in yielding) >= 0.65 * len(yielding)
    assert all(one.tpot_s is not None for one in yielding), "all are served"
    if not ablated:
        return
    keep_order_of_arrival(monkeypatch)
    assert sum(one.meets(slo) for one in served()) <= 0.5 * len(yielding)


def test_a_request_waits_for_room_under_its_limit_while_its_first_token_has_time() -> None:
    """Beside 50 sequences, with which a step takes 7 ms, and whose limits are as tight; and while it is late.
    None waits where no worker could meet the limit, and no longer once a sequence with a looser one runs,
    which did not wait."""

    async def main() -> None:
        cluster = Cluster(apart(), aware())
        others = [asyncio.create_task(cluster.serve(0, Slo(None, 0.005))) for _ in range(50)]
        await asyncio.sleep(1.3)
        unmeetable = asyncio.create_task(cluster.serve(0, Slo(0.5, 0.003)))
        waiting = [asyncio.create_task(cluster.serve(0, Slo(0.5, tpot_s))) for tpot_s in (0.0055, 0.006)]
        long = asyncio.create_task(cluster.serve(0, Slo(0.5, 0.006), prompt=4096))  # 103 ms
        await asyncio.sleep(0.4)
        loose, beside_loose = (
            asyncio.create_task(cluster.serve(0, Slo(0.5, tpot_s))) for tpot_s in (0.02, 0.006)
        )
        for request, least, most in (
            (unmeetable, 0.02, 0.1), (waiting[0], 0.42, 0.5), (waiting[1], 0.42, 0.5), (long, 0.5, 0.65),
            (loose, 0.02, 0.1), (beside_loose, 0.02, 0.1),
        ):  # fmt: skip
            ttft_s = (await request).ttft_s
            assert ttft_s is not None
            assert least < ttft_s < most
        await asyncio.gather(*others)
        assert (await cluster.serve(0, Slo(0.5, 0.006))).meets(Slo(0.03, 0.006))

    run_virtual(main())


@WITHOUT_THE_RULE
def test_sequences_that_will_have_ended_by_a_first_token_leave_room(
    monkeypatch: pytest.MonkeyPatch, ablated: bool
) -> None:
    """A prompt of 4,096 tokens takes 103 ms, its sequence 1.5 s: of ten slots one waits for its first token,
    while another one ends. More requests are served, and none misses its time per output token."""
    slo = Slo(0.5, 0.006)

    def in_time() -> float:
        served = [one for _, one in simulate(apart, aware(), Traffic(5.5, 20, (slo,), prompt=4096))]
        assert all(one.tpot_s is not None and one.tpot_s <= 0.006 for one in served)
        return sum(one.meets(slo) for one in served) / len(served)

    assert in_time() >= 0.75
    if not ablated:
        return
    monkeypatch.setattr(Worker, "staying", 1.0)
    assert in_time() <= 0.63


def test_no_request_waits_for_room_under_its_limit_until_it_is_too_late() -> None:
    """The request's place in the queue ends long before its first token is due, and it is placed once it is
    late for that: the others miss their limits already. Or its output takes 1.5 s more."""

    async def main() -> None:
        cluster, loop = Cluster(apart(), aware()), asyncio.get_running_loop()
        others = [asyncio.create_task(cluster.serve(0, Slo(None, 0.005))) for _ in range(50)]
        await asyncio.sleep(1.3)
        slo = Slo(100.0, 0.006)
        queue, began = cluster.queues[0], loop.time()
        entry = queue.enter(ClientCall(), slo)
        (await queue.claim(entry, 1024, 256, began + 0.4, lambda worker: 0)).release()
        assert loop.time() - began == pytest.approx(0.326, abs=0.01)
        hurried = await cluster.serve(0, slo, deadline=loop.time() + 1.6)
        assert hurried.ttft_s is not None
        assert hurried.ttft_s < 0.1
        await asyncio.gather(*others)

    run_virtual(main())


@WITHOUT_THE_RULE
def test_all_is_well_again_soon_after_an_overload(monkeypatch: pytest.MonkeyPatch, ablated: bool) -> None:
    """Twice the sustainable rate for five seconds, then three quarters of it: from two seconds after that on,
    none is refused or late. If late ones did not yield, what waits would have all miss their limits."""
    slo, over_s = Slo(0.5, 0.012), 5.0
    traffic = Traffic(84, over_s, (slo,), then=32)

    def in_time_after(refuse_late: bool) -> float:
        served = [one for _, one in simulate(exchanging, aware(refuse_late=refuse_late), traffic)]
        after = [one.meets(slo) for one in served if one.arrived_s > over_s + 2]
        return sum(after) / len(after)

    assert in_time_after(True) >= 0.98
    assert in_time_after(False) >= 0.98
    if not ablated:
        return
    keep_order_of_arrival(monkeypatch)
    assert in_time_after(False) <= 0.5


@pytest.mark.usefixtures("in_order_of_arrival")
@pytest.mark.slow
def test_a_decode_worker_that_prefills_conditionally_is_no_worse_than_either_arrangement() -> None:
    """One prefill worker beside a combined one that receives handoffs. At 8 ms the combined one may hardly
    prefill, and two combined workers are worse; at 12 ms it must, and prefill and decode apart are worse; so
    are prompts in turn at both. At 20 ms two combined workers are the best arrangement."""

    def combined() -> list[Machine]:
        return of(("both", 1), ("both", 1))

    def share(machines: Machines, make: Make, rate: float, tpot_ms: float) -> float:
        served = simulate(machines, make, Traffic(rate, 8, (Slo(0.5, tpot_ms / 1e3),)))
        return attained(served) / len(served)

    assert share(conditional, aware(), 32, 8) >= 0.9
    assert share(combined, aware(), 32, 8) < 0.5
    assert share(conditional, InTurn, 32, 8) < 0.5
    assert share(conditional, aware(), 42, 12) >= 0.9
    assert share(apart, aware(), 42, 12) < 0.9
    assert share(conditional, InTurn, 42, 12) < 0.5
    assert share(conditional, aware(), 44, 20) >= 0.97 * share(combined, aware(), 44, 20)


@WITHOUT_THE_RULE
@pytest.mark.usefixtures("in_order_of_arrival")
def test_decode_with_time_to_spare_computes_prompts_before_requests_are_late(
    monkeypatch: pytest.MonkeyPatch,
    ablated: bool,
) -> None:
    """More prompts than one prefill worker can compute, at a limit that the combined one meets with prompts
    of its own. If a delay of its streams counted as much as one of requests that wait, they would wait until
    their first tokens are late."""

    def share(rate: float, tpot_ms: float, seed: int) -> float:
        served = simulate(conditional, aware(), Traffic(rate, 8, (Slo(0.5, tpot_ms / 1e3),), seed))
        return attained(served) / len(served)

    assert share(44, 12, seed=1) >= 0.97
    assert share(50, 20, seed=2) >= 0.97
    if not ablated:
        return
    monkeypatch.setattr(forecast, "stream_urgency", lambda used: 1.0)
    monkeypatch.setattr(forecast, "prompt_urgency", lambda first_token_s, due: 1.0)
    assert share(44, 12, seed=1) <= 0.92
    assert share(50, 20, seed=2) <= 0.85


@WITHOUT_THE_RULE
def test_predictions_learn_what_workers_do_not_report(monkeypatch: pytest.MonkeyPatch, ablated: bool) -> None:
    """Tokens take 4 % longer, or 10 % less, than the worker reports. Without correction more are let in than
    can be served in time, or fewer than could be."""
    slo = Slo(0.5, 0.006)

    def served(unreported: float) -> tuple[float, float]:
        """Requests a second that meet the limit, of 28; and their share of those not refused."""

        def machines() -> list[Machine]:
            return [Machine("prefill"), Machine("decode", unreported=unreported)]

        found = [one for _, one in simulate(machines, aware(refuse_late=True), Traffic(28, 12, (slo,)))]
        met = sum(one.meets(slo) for one in found)
        return met / 12, met / sum(one.refused_s is None for one in found)

    corrected = [served(unreported) for unreported in (1.04, 0.9)]
    assert min(share for _, share in corrected) >= 0.95
    if not ablated:
        return
    monkeypatch.setattr(TpotRatio, "ended", lambda ratio, measured_s, predicted_s: None)
    slower, faster = (served(unreported) for unreported in (1.04, 0.9))
    assert slower[0] < 0.8 * corrected[0][0]
    assert slower[1] < 0.7
    assert faster[0] < 0.85 * corrected[1][0]


def test_what_no_worker_can_meet_is_refused_at_once() -> None:
    served = simulate(
        lambda: of(("prefill", 1), ("decode", 1)), aware(refuse_late=True), Traffic(5, 4, (Slo(0.5, 0.003),))
    )
    assert all(one.refused_s == 0 for _, one in served)
    served = simulate(
        lambda: of(("prefill", 1), ("decode", 1)), aware(refuse_late=True), Traffic(5, 4, (Slo(0.02, None),))
    )
    assert all(one.refused_s == 0 for _, one in served)


@WITHOUT_THE_RULE
def test_old_heartbeats_do_not_make_routers_herd(ablated: bool) -> None:
    """Four routers see each other's requests two seconds late. By heartbeats alone they would all send to the
    worker that was emptiest then."""

    def machines() -> list[Machine]:
        seen.append(of(*[("prefill", 1.0)] * 3, *[("decode", 1.0)] * 4))
        return seen[-1]

    seen: list[list[Machine]] = []
    traffic = Traffic(80, 15, (Slo(0.5, 0.008),))
    by_counts = simulate(machines, aware(), traffic, routers=4, heartbeat_s=2.0)
    assert attained(by_counts) >= 0.9 * len(by_counts)
    counted = [one.most_running for one in seen[0] if one.role == "decode"]
    assert max(counted) <= 3 * min(counted), counted
    if not ablated:
        return
    by_heartbeats = simulate(machines, Heartbeats, traffic, routers=4, heartbeat_s=2.0)
    assert attained(by_heartbeats) < 0.2 * len(by_heartbeats)
    herded = [one.most_running for one in seen[1] if one.role == "decode"]
    assert max(herded) > 10 * min(herded), herded
