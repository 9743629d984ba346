"""Room under a limit, for a request of which workers have cached different parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement.claim import PrefillClaim
from services.router.placement.placement import NoRoom, Placement
from services.router.placement.room import Waits
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import ClientCall
from services.router.workers.backlog import Backlog
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import Found, bare_worker, placement_of, pools_of

LIMIT_S, TOKENS = 0.006, 400
# Prompt tokens with which a worker's queue is full, and a quarter of them.
FULL, QUARTER = 1000, 250


def combined(name: str, sequences: int, each_s: float = 0.0005) -> Worker:
    """Each sequence makes a step of 5 ms 0.5 ms longer: two of them leave no room under the limit."""
    worker = bare_worker(name)
    worker.costs = StepCosts(prefill_token_s=2e-5, decode_step_s=0.005, decode_sequence_s=each_s)
    worker.claimed_slots, worker.tpot_limits = sequences, [LIMIT_S] * sequences
    return worker


def chosen(full: Worker, other: Worker, cached: tuple[int, int], waits: Waits) -> str:
    """The decode worker of a request, or why it has none."""
    found = placement_of([full, other]).pick(
        TOKENS, 10, dict(zip((full, other), cached, strict=True)).__getitem__, tpot_s=LIMIT_S,
        waits=lambda: waits,
    )  # fmt: skip
    return found.name if isinstance(found, NoRoom) else found.decode.name


@pytest.mark.parametrize(
    ("cached", "waits", "name"),
    [
        ((380, 0), Waits.FOR_ITSELF, "CACHED"),
        ((380, 300), Waits.FOR_ITSELF, "both-1"),  # 100 tokens in place of 20
        ((0, 0), Waits.FOR_ITSELF, "both-1"),
        ((200, 0), Waits.FOR_ITSELF, "both-1"),  # 400 in place of 200
        ((300, 100), Waits.FOR_ITSELF, "CACHED"),  # 300 in place of 100
        ((380, 0), Waits.FOR_OTHERS, "both-1"),
    ],
)
def test_a_request_that_has_time_waits_for_the_worker_that_has_it_cached(
    cached: tuple[int, int], waits: Waits, name: str
) -> None:
    assert chosen(combined("both-0", 2), combined("both-1", 0), cached, waits) == name


@pytest.mark.parametrize(("sequences", "name"), [(4, "both-1"), (7, "CACHED")])
def test_where_there_is_much_room_nothing_waits_for_another(sequences: int, name: str) -> None:
    """The room is for 8 sequences: with 4 there is room for 4 more, and with 7 for one."""
    other = combined("both-1", sequences, 0.0001)
    assert chosen(combined("both-0", 2), other, (380, 0), Waits.FOR_ITSELF) == name


def test_nothing_waits_for_a_worker_that_is_gone() -> None:
    full = combined("both-0", 2)
    full.following = False
    assert chosen(full, combined("both-1", 0), (380, 0), Waits.FOR_ITSELF) == "both-1"


def queueing(name: str, tokens: int) -> Worker:
    """A worker that decodes nothing and has `tokens` prompt tokens queued."""
    worker = combined(name, 0)
    worker.queued_tokens = tokens
    return worker


def placed(
    cached: Worker, other: Worker, hits: tuple[int, int] = (380, 0), *, returning: bool = False
) -> str:
    """The decode worker of a request without limits, or why it has none."""
    found = placement_of([cached, other], FULL).pick(
        TOKENS, 10, dict(zip((cached, other), hits, strict=True)).__getitem__, returning=returning
    )
    return found.name if isinstance(found, NoRoom) else found.decode.name


@pytest.mark.parametrize(
    ("cached_queue", "other_queue", "hits", "name"),
    [
        (FULL, QUARTER, (380, 0), "CACHED"),
        (FULL, QUARTER - 1, (380, 0), "both-1"),  # a prefix that many requests have spreads
        (FULL, QUARTER, (380, 300), "both-1"),  # 100 tokens in place of 20
        (FULL, QUARTER, (0, 0), "both-1"),
        (FULL, FULL, (380, 0), "PREFILL"),  # neither has room, whatever is cached
        (FULL - 1, QUARTER, (380, 0), "both-0"),
    ],
)
def test_while_a_prompt_queue_is_full_only_a_short_one_takes_what_is_cached_there(
    cached_queue: int, other_queue: int, hits: tuple[int, int], name: str
) -> None:
    assert placed(queueing("both-0", cached_queue), queueing("both-1", other_queue), hits) == name


def test_a_worker_that_has_it_cached_is_taken_though_another_one_decodes_less() -> None:
    """The worker's sequences delay more than the prompt's tokens do: only where the other has few prompt
    tokens."""
    cached = queueing("both-0", 0)
    cached.claimed_slots = 7
    assert placed(cached, queueing("both-1", QUARTER - 1)) == "both-1"
    assert placed(cached, queueing("both-1", QUARTER)) == "both-0"


def lose(worker: Worker) -> None:
    worker.following = False


def fill(worker: Worker) -> None:
    worker.claimed_slots = worker.described.load.slots


def forget_costs(worker: Worker) -> None:
    worker.costs = StepCosts()


def queue_for_long(worker: Worker) -> None:
    worker.backlog.add(0.3, FULL)


def stop_to_compute(worker: Worker) -> None:
    """Four prompts of 12 ms were added 1.1 s ago."""
    now = [0.0]
    worker.backlog = Backlog(lambda: now[0])
    for _ in range(4):
        worker.backlog.add(0.012, FULL // 4)
    now[0] = 1.1


@pytest.mark.parametrize(
    "happens",
    [lose, fill, forget_costs, queue_for_long, stop_to_compute, partial(Worker.set_drained, drained=True)],
)
def test_nothing_waits_for_a_worker_that_will_not_take_it_soon(happens: Callable[[Worker], None]) -> None:
    cached, other = queueing("both-0", FULL), queueing("both-1", QUARTER)
    assert placed(cached, other) == "CACHED"
    happens(cached)
    assert placed(cached, other) == "both-1"


def test_a_request_that_returns_waits_for_no_cache() -> None:
    assert placed(queueing("both-0", FULL), queueing("both-1", QUARTER), returning=True) == "both-1"


async def test_nothing_waits_for_a_worker_that_has_just_refused_a_request() -> None:
    cached = queueing("both-0", FULL)
    cached.refused()
    assert placed(cached, queueing("both-1", QUARTER)) == "both-1"


@pytest.mark.parametrize("waits", [Waits.FOR_ITSELF, Waits.FOR_OTHERS])
@pytest.mark.parametrize(("tokens", "name"), [(QUARTER, "CACHED"), (QUARTER - 1, "both-1")])
def test_a_request_under_a_limit_waits_for_a_full_prompt_queue_too(
    tokens: int, name: str, waits: Waits
) -> None:
    """The other one has room for many sequences, but not for prompts."""
    cached, other = combined("both-0", 0), combined("both-1", 0, 1e-5)
    cached.queued_tokens, other.queued_tokens = FULL, tokens
    assert chosen(cached, other, (380, 0), waits) == name


async def test_a_request_that_waits_for_its_cache_blocks_none_behind_it() -> None:
    """The request is placed once that worker has room for its prompt, or another one has much."""
    cached, other = workers = [combined("both-0", 0), combined("both-1", 0)]
    queued = [PrefillClaim(*one) for one in ((cached, 10, 1e-3), (other, 40, 1e-3))]
    for worker, tokens in ((cached, FULL // 2), (cached, FULL // 2 - 10), (other, QUARTER - 40)):
        PrefillClaim(worker, tokens, 0.02)
    queue = WaitingQueue(Placement(Found(workers), pools_of(workers), FULL), 8, 60.0)
    until = asyncio.get_running_loop().time() + 60

    async def claim(hits: dict[Worker, int]) -> Worker:
        entry = queue.enter(ClientCall())
        return (await queue.claim(entry, TOKENS, 10, until, lambda worker: hits.get(worker, 0))).decode

    first, second = (asyncio.create_task(claim({cached: 380})) for _ in range(2))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert await claim({other: 380}) is other
        assert not first.done()
        queued[0].prefill_ended()
        queue.place_waiting()
        assert await first is cached
        assert not second.done()
        queued[1].prefill_ended()
        queue.place_waiting()
        assert await second is other
