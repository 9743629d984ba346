"""Workers that a request is placed on, and reasons for which none would do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.perf_model.step_costs import StepCosts
from baton.v1.worker_pb2 import DescribeResponse, Load
from services.router.placement.claim import Claim, PrefillClaim
from services.router.placement.early_refusal import Demand
from services.router.placement.fitting import FailedPair, Fitting
from services.router.placement.placement import NoRoom, Placement
from services.router.placement.pools import Pools
from services.router.request.limits import Needs
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from services.router.workers.backlog import Queued
from services.router.workers.other_claims import SiblingCounts
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import (
    MODEL,
    TOKENIZER,
    Found,
    bare_worker,
    placement_of,
    pools_of,
    workers_of,
)

PREFILL, DECODE, BOTH = "prefill-0", "decode-0", "both-0"
Change = Callable[[Worker], None]


def placed(placement: Placement, cached: dict[Worker, int] | None = None) -> tuple[str, str] | NoRoom:
    """The names of the pair that a prompt of 50 tokens gets, or why it gets none; nothing stays claimed."""
    claim = placement.pick(50, 10, lambda worker: (cached or {}).get(worker, 0))
    if isinstance(claim, NoRoom):
        return claim
    claim.release()
    return claim.prefill.name, claim.decode.name


def test_prefix_hits_are_read_once_for_each_worker() -> None:
    workers = workers_of(PREFILL, "prefill-1", DECODE, "decode-1")
    asked: list[str] = []

    def cached(worker: Worker) -> int:
        asked.append(worker.name)
        return 0

    assert isinstance(placement_of(workers).pick(50, 10, cached), Claim)
    assert asked == [worker.name for worker in workers]


def free(slots: int) -> Change:
    def change(worker: Worker) -> None:
        worker.claimed_slots = 8 - slots

    return change


def promised(tokens: int) -> Change:
    def change(worker: Worker) -> None:
        worker.reserved_tokens = tokens

    return change


def queued(tokens: int) -> Change:
    def change(worker: Worker) -> None:
        worker.queued_tokens = tokens

    return change


# Two decoding workers: how they differ from an idle one, and what they have cached of the prompt; the second
# wins.
SECOND_WINS: list[tuple[str, str, list[Change], list[Change], tuple[int, int]]] = [
    ("decode-0", "decode-1", [free(3)], [free(4), promised(90)], (9, 0)),
    ("decode-0", "decode-1", [promised(91)], [promised(90)], (9, 0)),
    ("decode-0", "decode-1", [], [], (8, 9)),
    # A worker that prefills for itself, by what its cache saves beyond its queue.
    ("both-0", "both-1", [free(8)], [free(2)], (0, 1)),
    ("both-0", "both-1", [queued(9)], [queued(7), free(2)], (30, 29)),
    ("both-0", "both-1", [queued(30), free(2)], [queued(40), free(3)], (30, 30)),
    ("decode-0", "both-1", [], [free(2)], (40, 1)),
]


@pytest.mark.parametrize(("first", "second", "of_first", "of_second", "cached"), SECOND_WINS)
def test_the_least_loaded_decode_worker_or_the_one_whose_cache_saves_most(
    first: str, second: str, of_first: list[Change], of_second: list[Change], cached: tuple[int, int]
) -> None:
    workers = [*workers_of(first, second, PREFILL)]
    for worker, changes in zip(workers, (of_first, of_second), strict=False):
        for change in changes:
            change(worker)
    has = dict(zip(workers, cached, strict=False))
    for ordered in (workers, [*reversed(workers)]):
        pair = placed(placement_of(ordered), has)
        assert not isinstance(pair, NoRoom)
        assert pair[1] == second


@pytest.mark.parametrize(
    ("queues", "cached", "chosen"),
    [
        ((20, 19, 21), (0, 0, 0), "prefill-1"),
        ((20, 19, 21), (0, 0, 3), "prefill-2"),
        ((20, 19, 21), (2, 0, 1), "prefill-0"),
    ],
)
def test_the_prefill_worker_with_the_least_to_compute_first(
    queues: tuple[int, ...], cached: tuple[int, ...], chosen: str
) -> None:
    workers = workers_of("prefill-0", "prefill-1", "prefill-2", DECODE)
    for worker, tokens in zip(workers, queues, strict=False):
        worker.queued_tokens = tokens
    pair = placed(placement_of(workers), dict(zip(workers, cached, strict=False)))
    assert pair == (chosen, DECODE)


async def test_workers_without_room_are_passed_over() -> None:
    """Workers are tried in the order in which they would be chosen: the emptiest first."""
    away, refusing, barred, unmatched, good = [
        bare_worker(f"decode-{number}", fingerprint=b"other" if number == 3 else b"same")
        for number in range(5)
    ]
    good.claimed_slots = 7  # one slot is free
    away.following = False
    prefill, later = workers_of("prefill-0", "prefill-1")
    later.queued_tokens = 99
    workers = [away, refusing, barred, unmatched, good, prefill, later]
    placement = placement_of(workers, ahead=100)
    refusing.refused()

    def pick() -> Claim | NoRoom:
        return placement.pick(50, 10, may_use=lambda worker: worker is not barred)

    for chosen in (prefill, later):
        claim = pick()
        assert not isinstance(claim, NoRoom)
        assert (claim.prefill, claim.decode) == (chosen, good)
        claim.release()
        chosen.queued_tokens = 100  # as much as a prompt may have before it
    assert pick() is NoRoom.PREFILL
    later.queued_tokens = 99
    assert isinstance(pick(), Claim)
    later.queued_tokens = 0
    assert good.free_slots == 0
    assert pick() is NoRoom.PREFILL  # `unmatched` has a slot, and no worker computes prompts for it


async def test_a_prefill_worker_that_just_refused_gets_no_work() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    placement = placement_of([prefill, decode])
    prefill.refused()
    assert placed(placement) is NoRoom.PREFILL
    assert placement.pick_prefill(50) is NoRoom.PREFILL
    assert placement.usable()  # it will have room
    await asyncio.sleep(0.1)  # twice `REFUSED_FOR_S`
    assert isinstance(placement.pick_prefill(50), PrefillClaim)


@pytest.mark.parametrize(
    ("there", "placed"),
    [
        ([], True),
        ([(100, 0.1)], True),
        ([(100, 0.3)], False),
        ([(60, 0.1), (60, 0.1)], False),
        ([(100, 0.0)], True),
    ],
    ids=["none", "one", "one-that-takes-long", "two", "one-of-an-unmeasured-worker"],
)
def test_a_long_prompt_has_the_next_one_sent_after_it(there: list[tuple[int, float]], placed: bool) -> None:
    """Else the worker would compute nothing from its end until the next one arrives."""
    prefill, decode = workers_of(PREFILL, DECODE)
    placement = placement_of([prefill, decode], ahead=100)
    claims = [PrefillClaim(prefill, tokens, seconds) for tokens, seconds in there]
    assert isinstance(placement.pick(100, 10), Claim) is placed
    if placed and claims:
        assert placement.pick(100, 10) is NoRoom.PREFILL


@pytest.mark.parametrize(
    ("prefills", "there", "placed"),
    [
        (BOTH, [60, 60], True),
        (BOTH, [80, 70], False),
        (BOTH, [40, 40, 40], False),
        (PREFILL, [60, 60], False),
    ],
    ids=["two", "two-long-ones", "three", "no-decode-steps"],
)
def test_a_combined_worker_has_a_third_prompt_that_may_share_steps(
    prefills: str, there: list[int], placed: bool
) -> None:
    worker, *_ = workers = workers_of(prefills, *([DECODE] if prefills == PREFILL else []))
    placement = placement_of(workers, ahead=100)
    claims = [PrefillClaim(worker, tokens, 0.01) for tokens in there]
    assert isinstance(placement.pick(10, 10), Claim) is placed
    assert len(claims) == len(there)


def test_a_prompt_of_a_sibling_process_counts_as_one_that_is_there() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    placement = placement_of([prefill, decode], ahead=100)
    for prompts, expected in ((1, Claim), (2, NoRoom)):
        prefill.others.set_siblings(SiblingCounts(processes=1, queued_tokens=200, queued_prompts=prompts))
        claim = placement.pick(100, 10)
        assert isinstance(claim, expected)
        if isinstance(claim, Claim):
            claim.release()


def test_the_predicted_first_token_is_that_of_the_calls_own_pool() -> None:
    """A call that is bound to the old pool is not served by the new one, which may be quicker."""
    slow = workers_of(PREFILL, DECODE)
    quick = [bare_worker(name, checkpoint=b"new") for name in ("prefill-1", "decode-1")]
    slow[0].costs = StepCosts(prefill_token_s=1e-3)
    quick[0].costs = StepCosts(prefill_token_s=1e-4)
    workers = [*slow, *quick]
    placement = Placement(Found(workers), pools_of(workers), 1000, refuse_late=True)
    call = ClientCall()
    assert isinstance(placement.pick(50, 10, call=call), Claim)
    placement.pools.switch(quick[0].pool)
    demand = Demand(100, 100, 10, Slo(60.0, None))
    for asking, first, prompt in ((call, slow[0], 1e-3), (ClientCall(), quick[0], 1e-4)):
        seconds = placement.longest_first_token_s(100, lambda worker: 0, asking)
        assert seconds == pytest.approx(1100 * prompt)
        own = placement.check_in_time(demand, 60.0, lambda worker: 0, asking, Queued())
        assert own == pytest.approx(first.costs.prompt_s(100))
    placement.refuse_late = False
    assert placement.check_in_time(demand, 60.0, lambda worker: 0, call, Queued()) == 0.0


def test_what_a_prompt_takes_is_less_where_a_worker_has_cached_some_of_it() -> None:
    first, second, _ = workers = workers_of(PREFILL, "prefill-1", DECODE)
    for worker in (first, second):
        worker.costs = StepCosts(prefill_token_s=1e-3)
    placement = Placement(Found(workers), pools_of(workers), 1000, refuse_late=True)

    def cached(worker: Worker) -> int:
        return 60 if worker is second else 0

    call = ClientCall()
    assert placement.longest_first_token_s(100, cached, call) == pytest.approx(0.040 + 1.0)
    demand = Demand(100, 100, 10, Slo(60.0, None))
    seconds = placement.check_in_time(demand, 60.0, cached, call, Queued())
    assert seconds == pytest.approx(second.costs.prompt_s(100, 60))
    assert seconds < second.costs.prompt_s(100)


def test_where_no_worker_computes_prompts_they_take_no_time() -> None:
    """The request waits for one in the queue."""
    prefill, decode = workers_of(PREFILL, DECODE)
    placement = Placement(Found([prefill, decode]), pools_of([prefill, decode]), 1000, refuse_late=True)
    prefill.reachable = False
    call, demand = ClientCall(), Demand(100, 100, 10, Slo(60.0, None))
    assert placement.longest_first_token_s(100, lambda worker: 0, call) == 0.0
    assert placement.check_in_time(demand, 60.0, lambda worker: 0, call, Queued()) == 0.0
    assert placement.least(100, call) == (8, 0.0)


def test_the_least_that_a_call_takes_is_of_its_own_pool_and_without_caches() -> None:
    old = [bare_worker(PREFILL), bare_worker(DECODE, slots=3)]
    new = [bare_worker("prefill-1", checkpoint=b"new"), bare_worker("decode-1", checkpoint=b"new", slots=5)]
    old[0].costs, new[0].costs = StepCosts(prefill_token_s=1e-3), StepCosts(prefill_token_s=1e-4)
    workers = [*old, *new]
    placement = placement_of(workers)
    call = ClientCall()
    assert isinstance(placement.pick(50, 10, call=call), Claim)
    placement.pools.switch(new[0].pool)
    assert placement.least(100, call) == (3, old[0].costs.prompt_s(100))
    assert placement.least(100, ClientCall()) == (5, new[0].costs.prompt_s(100))
    new[0].described.MergeFrom(DescribeResponse(cache_dtype="bfloat16", load=Load(block_tokens=16)))
    assert placement.least(100, ClientCall()) == (5, 0.0), "it may be cached"


def test_whether_a_request_fits_is_asked_of_its_own_pool_without_the_pairs_where_it_failed() -> None:
    old = [bare_worker(name, context=200) for name in (PREFILL, DECODE)]
    new = [bare_worker(name, checkpoint=b"new", context=50) for name in ("prefill-1", "decode-1")]
    placement = placement_of([*old, *new])
    call = ClientCall()
    assert isinstance(placement.pick(50, 10, call=call), Claim)
    placement.pools.switch(new[0].pool)
    long = Needs(100, 120)
    assert (placement.fits(long, call), placement.fits(long)) == (True, False)
    assert not placement.fits(long, call, [FailedPair(*old)])
    assert placement.fits(long, call, [FailedPair(*new)])
    both, none = (Fitting(frozenset(pair[:1]), frozenset(pair[1:])) for pair in (old, []))
    assert placement.fitting(long, call) == (both, both)
    assert placement.fitting(long) == (none, Fitting(frozenset(new[:1]), frozenset(new[1:])))


def test_a_request_stays_in_the_pool_of_its_first_attempt() -> None:
    old = workers_of(PREFILL, DECODE)
    new = [bare_worker(name, checkpoint=b"new") for name in ("prefill-9", "decode-9")]
    pools = pools_of([*old, *new])
    placement = Placement(Found([*old, *new]), pools, prefill_ahead_tokens=1000)
    assert placement.pools.several
    call = ClientCall()
    assert isinstance(placement.pick(50, 10, call=call), Claim)
    assert (call.pool, placement.pools.current) == (old[0].pool, old[0].pool)
    assert [call.formats.get(worker.decodes) for worker in old] == ["bfloat16"] * 2
    pools.switch(new[0].pool)
    assert placement.pools.current == new[0].pool
    for bound, (prefill, decode) in ((call, old), (None, new), (ClientCall(), new)):
        claim = placement.pick(50, 10, call=bound)
        assert not isinstance(claim, NoRoom)
        assert (claim.prefill, claim.decode) == (prefill, decode)
        claim = placement.pick_prefill(50, bound)  # type: ignore[assignment]
        assert not isinstance(claim, NoRoom)
        assert claim.prefill is prefill
    for worker in old:
        worker.reachable = False
    assert placement.usable()
    assert placement.usable(ClientCall())
    assert not placement.usable(call)
    assert placement.pick(50, 10, call=call) is NoRoom.DECODE
    assert placement.pick_prefill(50, call) is NoRoom.PREFILL


def test_one_pool_is_not_several() -> None:
    placement = placement_of(workers_of(PREFILL, DECODE))
    assert not placement.pools.several


# Names of workers; unreachable ones; why a request would not be served, None if it would.
USABLE: list[tuple[list[str], list[str], str | None]] = [
    ([PREFILL, DECODE], [], None),
    ([BOTH], [], None),
    ([], [], "no worker is ready"),
    ([PREFILL, DECODE], [PREFILL, DECODE], "no worker is ready"),
    ([PREFILL], [], "no decode worker is ready"),
    ([PREFILL, DECODE], [DECODE], "no decode worker is ready"),
    ([DECODE], [], "no prefill worker is ready"),
    ([PREFILL, DECODE], [PREFILL], "no prefill worker is ready"),
    ([PREFILL, BOTH], [BOTH], "no decode worker is ready"),
]


@pytest.mark.parametrize(("names", "away", "reason"), USABLE)
def test_a_router_without_a_pair_reports_what_is_missing(
    names: list[str], away: list[str], reason: str | None
) -> None:
    workers = workers_of(*names)
    pools = pools_of(workers)
    for worker in workers:
        worker.reachable = worker.name not in away
    pools.review()
    placement = Placement(Found(workers), pools, prefill_ahead_tokens=1000)
    assert placement.usable() is (reason is None)
    if reason is not None:
        assert placement.unusable_reason() == reason


def test_workers_of_other_pools_or_models_do_not_make_a_router_usable() -> None:
    prefill, decode = bare_worker(PREFILL, fingerprint=b"other"), bare_worker(DECODE)
    apart = placement_of([prefill, decode])
    assert (apart.usable(), apart.unusable_reason()) == (False, "no prefill worker matches a decode worker")
    pools = Pools(MODEL, TOKENIZER, "another", lambda: [prefill, decode])
    pools.review()
    none = Placement(Found([prefill, decode]), pools, prefill_ahead_tokens=1000)
    reason = "no worker that is ready belongs to the model's pool"
    assert (none.usable(), none.unusable_reason()) == (False, reason)


def test_a_pair_whose_kv_formats_differ_is_refused_with_both() -> None:
    prefill = bare_worker(PREFILL, fingerprint=b"other", kv_format="bfloat16/64/native")
    decode = bare_worker(DECODE, kv_format="float8_e4m3fn/64/native")
    assert prefill.pool != decode.pool
    assert placement_of([prefill, decode]).unusable_reason() == (
        "no prefill worker matches a decode worker: "
        "their KV formats are bfloat16/64/native and float8_e4m3fn/64/native"
    )


def grouped(**groups: str) -> list[Worker]:
    """Workers by name, `prefill_0="a"` for one of the group a."""
    workers = workers_of(*(name.replace("_", "-") for name in groups))
    for worker, group in zip(workers, groups.values(), strict=True):
        worker.group = group
    return workers


def test_equal_workers_of_one_group_are_preferred() -> None:
    workers = grouped(prefill_0="a", prefill_1="b", decode_0="b", decode_1="a")
    placement = placement_of(workers)
    assert placed(placement) == ("prefill-1", "decode-0")
    workers[1].queued_tokens = 1  # load goes before distance
    assert placed(placement) == ("prefill-0", "decode-1")
    workers[3].claimed_slots = 1
    assert placed(placement) == ("prefill-0", "decode-0")


def test_a_near_decode_worker_must_have_room() -> None:
    workers = grouped(prefill_0="a", decode_0="b", decode_1="a")
    placement = placement_of(workers)
    assert placed(placement) == ("prefill-0", "decode-1")
    claim = placement.pick(50, 10, may_use=lambda worker: worker.name != "decode-1")
    assert not isinstance(claim, NoRoom)
    assert claim.decode.name == "decode-0"
    claim.release()
    workers[2].following = False
    assert placed(placement) == ("prefill-0", "decode-0")
