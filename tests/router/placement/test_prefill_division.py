"""Combined workers that exchange sequences: where each computes its own prompts, who is designated for
prefill elsewhere, and what that gives in virtual time, where round robin, two combined workers or prefill and
decode apart give less."""

from __future__ import annotations

import itertools
from functools import partial
from operator import is_not

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import Claim, PrefillClaim
from services.router.placement.placement import NoRoom, Placement
from services.router.placement.prefill_division import PrefillDivision, designated_for_prefill
from services.router.request.slo import Slo
from services.router.workers.worker import Worker
from tests.router.placement.modelled_cluster import COSTS, Machine, Make, Traffic, attained, simulate
from tests.router.workers.bare_workers import Found, bare_worker, placement_of, pools_of

AHEAD = 2048


class InTurn(Placement):
    """Round robin: the workers decode in turn, and compute the prompts in turn, of one another too."""

    def __init__(self, found: Found, workers: list[Worker]) -> None:
        super().__init__(found, pools_of(workers), AHEAD)
        self._pairs = itertools.cycle(itertools.product(workers, workers))

    def pick(self, tokens: int, max_tokens: int, *more: object, **options: object) -> Claim | NoRoom:
        prefill, decode = next(self._pairs)
        return Claim(prefill, decode, tokens, tokens) if decode.free_slots > 0 else NoRoom.DECODE


def aware(found: Found, workers: list[Worker]) -> Placement:
    return Placement(found, pools_of(workers), AHEAD)


def refusing(found: Found, workers: list[Worker]) -> Placement:
    return Placement(found, pools_of(workers), AHEAD, refuse_late=True)


def exchanging() -> list[Machine]:
    return [Machine("both", exchanges=True) for _ in range(2)]


def combined() -> list[Machine]:
    return [Machine("both") for _ in range(2)]


def apart() -> list[Machine]:
    return [Machine("prefill"), Machine("decode")]


def share(machines: list[Machine], make: Make, traffic: Traffic, routers: int = 1) -> float:
    served = simulate(lambda: machines, make, traffic, routers=routers)
    return attained(served) / len(served)


@pytest.mark.parametrize("routers", [1, 4])
def test_two_that_exchange_divide_the_work_from_the_start(routers: int) -> None:
    """The limits of 8 ms and 16 requests a second and worker are met by prefill and decode apart alone: where
    both decode, the steps of both are slowed down by prompts."""
    traffic = Traffic(32, 5, (Slo(0.5, 0.008),))
    machines = exchanging()
    assert share(machines, aware, traffic, routers) >= 0.97
    assert machines[0].most_running <= 3 < machines[1].most_running


@pytest.mark.usefixtures("in_order_of_arrival")
@pytest.mark.slow
def test_two_that_exchange_are_no_worse_than_any_arrangement() -> None:
    """A designated worker computes the prompts of 1,024 tokens in and 256 out, and decodes nothing. With 256
    in and 512 out it would be idle for two thirds of the time: each computes its own. Every other arrangement
    fails in one of both."""
    worst = [1.0] * 3
    for traffic, least, most in (
        (Traffic(38, 5, (Slo(0.5, 0.009),)), 0, 3),
        (Traffic(60, 7, (Slo(0.5, 0.010),), prompt=256, output=512), 100, 300),
    ):
        machines = exchanging()
        assert share(machines, aware, traffic) >= 0.97
        assert least <= machines[0].most_running <= most
        others = ((apart(), aware), (combined(), aware), (exchanging(), InTurn))
        worst = [
            min(before, share(machines, make, traffic))
            for before, (machines, make) in zip(worst, others, strict=True)
        ]
    assert max(worst) < 0.7, worst


def test_under_overload_one_designated_decodes_nothing() -> None:
    """Twice the rate that the pair sustains, with early refusal: prompts take all of its time, and what the
    other worker has no room for is refused rather than decoded there."""
    machines = exchanging()
    served = simulate(lambda: machines, refusing, Traffic(80, 5, (Slo(0.5, 0.012),)))
    assert attained(served) >= 0.9 * 40 * 5
    assert machines[0].most_running <= 5


def test_half_of_those_that_exchange_are_designated_where_no_worker_only_prefills() -> None:
    def chosen(*workers: Worker) -> set[str]:
        return {worker.name for worker in designated_for_prefill(workers)}

    both = [bare_worker(f"both-{number}", receives_handoffs=True) for number in range(5)]
    assert chosen(*reversed(both)) == {"both-0", "both-1"}
    assert chosen(*both[:2], bare_worker("decode-0")) == {"both-0"}
    both[0].following = False
    assert chosen(*both) == {"both-1", "both-2"}, "the next one takes over"
    assert not chosen(both[0], both[1]), "one that is left does everything"
    assert not chosen(*both, bare_worker("prefill-0"))
    assert not chosen(bare_worker("both-8"), bare_worker("both-9")), "they keep to themselves"


def pair() -> tuple[Worker, Worker]:
    """One designated and another, with room for 100 sequences each."""
    workers = [bare_worker(f"both-{number}", receives_handoffs=True, slots=100) for number in range(2)]
    for worker in workers:
        worker.costs = COSTS
    return workers[0], workers[1]


def decoded_at(workers: tuple[Worker, Worker], placement: Placement | None = None) -> tuple[str, str, str]:
    """The worker that decodes a request, its count in `Placement.placed`, and the reason."""
    placement = placement or placement_of(list(workers), ahead=10**6)
    before = placement.placed.copy()
    claim = placement.pick(64, 10)
    assert not isinstance(claim, NoRoom)
    claim.release()
    (counted,) = placement.placed - before
    return claim.decode.name, counted, claim.reason


def test_each_computes_its_own_prompts_where_sequences_take_more_time() -> None:
    """A quarter more, until it is a fifth less."""
    designated, other = workers = pair()
    other.claimed_slots = 10
    placement = placement_of(list(workers), ahead=10**6)
    assert decoded_at(workers, placement)[0] == other.name
    for sequence_s, name in (
        (0.012, other.name),
        (0.013, designated.name),
        (0.0082, designated.name),
        (0.0078, other.name),
    ):
        placement.division = among(placement.division, 0.01, sequence_s)
        assert decoded_at(workers, placement)[0] == name, sequence_s
    placement.division = among(placement.division, 0.01, 0.02)
    why = "own prefill: a request's prompt takes 10 ms on average, its sequence 20"
    assert decoded_at(workers, placement) == (designated.name, "own", why)


def test_between_both_thresholds_a_process_does_as_the_first_one() -> None:
    """Whatever it came from: where they differ, one places sequences where the other leaves no room."""
    workers = pair()
    for sequence_s, alike in ((0.0122, False), (0.0128, True), (0.0082, False), (0.0078, True)):
        follows = PrefillDivision()
        found = []
        for follows.first_process in (False, True):
            found.append(
                among(follows, 0.01, sequence_s).divide(workers).may_decode(workers) == list(workers)
            )
        assert found == ([sequence_s > 0.01] * 2 if alike else [False, True]), sequence_s


def among(before: PrefillDivision, prompt_s: float, sequence_s: float) -> PrefillDivision:
    """The division after many requests of `prompt_s` and `sequence_s` seconds."""
    division = PrefillDivision()
    division.own_prompts, division.first_process = before.own_prompts, before.first_process
    for _ in range(100_000 // 256):
        division.placed(prompt_s, StepCosts(decode_sequence_s=sequence_s / 256), 0, 256)
    return division


def test_a_sequence_takes_as_long_as_outputs_are_not_as_they_may_be() -> None:
    division = PrefillDivision()
    workers = pair()
    costs = StepCosts(decode_context_token_s=2e-8)
    for _ in range(100):
        division.placed(0.01, costs, 1000, 1000)
    assert division.divide(workers).may_decode(workers) == list(workers), "20 ms"
    for _ in range(500):
        division.ended(100, 1000)
        division.placed(0.01, costs, 1000, 1000)
    assert division.divide(workers).may_decode(workers) == [workers[1]], "2 ms"


def test_what_a_sequence_costs_is_by_the_costs_of_late() -> None:
    """Workers at first count the cost as a part of the step; properties of requests are means over many."""
    division, workers = PrefillDivision(), pair()
    for sequence_s, count in ((0.0, 100), (1e-6, 100)):
        for _ in range(count):
            division.placed(0.01, StepCosts(decode_step_s=0.005, decode_sequence_s=sequence_s), 0, 1000)
        assert division.divide(workers).may_decode(workers) == [workers[1]]
    for max_tokens in (1000, 10):
        for _ in range(32):
            division.placed(0.01, StepCosts(decode_step_s=0.004, decode_sequence_s=2e-5), 0, max_tokens)
        assert division.divide(workers).may_decode(workers) == list(workers)


def test_of_three_workers_two_that_decode_are_compared_with_one_designated() -> None:
    """Sequences have to take more than twice the time of prompts before the third one gains by decoding."""
    workers = [bare_worker(f"both-{number}", receives_handoffs=True) for number in range(3)]
    assert among(PrefillDivision(), 0.01, 0.024).divide(workers).may_decode(workers) == workers[1:]
    assert among(PrefillDivision(), 0.01, 0.026).divide(workers).may_decode(workers) == workers


def test_one_designated_decodes_what_no_other_has_a_slot_for() -> None:
    """The designated worker with most room is taken; one that is reserved for another request has no slot for
    it."""
    workers = [bare_worker(f"both-{number}", receives_handoffs=True, slots=100) for number in range(4)]
    workers[0].claimed_slots = 5
    for worker in workers[2:]:
        worker.claimed_slots = 100
    placement = placement_of(workers, ahead=10**6)
    claim = placement.pick(64, 10)
    assert isinstance(claim, Claim)
    reason = "designated for prefill: no other worker has a free slot"
    assert (claim.prefill, claim.decode, claim.reason) == (workers[1], workers[1], reason)
    assert placement.division.divide(workers).may_decode(workers) == workers
    claim.release()
    workers[3].claimed_slots = 99
    assert placement.division.divide(workers).may_decode(workers) == workers[2:]
    for barred, decode in ((workers[0], workers[3]), (workers[3], workers[1])):
        claim = placement.pick(64, 10, may_use=partial(is_not, barred))
        assert isinstance(claim, Claim)
        assert claim.decode is decode
        claim.release()


def test_one_designated_that_is_idle_computes_though_the_other_would_delay_fewer() -> None:
    """Many wait, whom a prompt at the designated one would delay; the other has as many prompts as it may."""
    designated, other = workers = pair()
    other.claimed_slots = 20
    placement = placement_of(list(workers), ahead=2048)
    computing = [PrefillClaim(other, 1024, 0.04) for _ in range(3)]
    claim = placement.pick(1024, 10, behind=lambda: 100)
    assert not isinstance(claim, NoRoom)
    assert (claim.prefill, claim.decode) == (designated, other)
    claim.release()
    for one in computing:
        one.release()
    claim = placement.pick(1024, 10, behind=lambda: 100)
    assert not isinstance(claim, NoRoom)
    assert (claim.prefill, claim.decode) == (other, other)
