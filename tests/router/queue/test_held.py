"""Requests that wait for workers which others do not need, and the other way round."""

from __future__ import annotations

import asyncio

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.worker_pb2 import WorkerLimits
from services.router.placement.claim import Claim
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import ClientCall
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import bare_worker, placement_of

SMALL, LARGE = 100, 1000
QUEUE_S = 5.0

pytestmark = pytest.mark.virtual_time


def worker(name: str, kv_tokens: int, slots: int = 1) -> Worker:
    limits = WorkerLimits(kv_tokens=kv_tokens, max_prefills=1, sends_over=["grpc"], receives_over=["grpc"])
    return bare_worker(name, slots=slots, fingerprint=b"", limits=limits)


class Asking:
    """Requests that wait in one queue, in the order in which they came."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = list(workers)
        self.placement = placement_of(self.workers)
        self.queue = WaitingQueue(self.placement, 64, QUEUE_S)
        for one in workers:
            one.changed = self.queue.place_waiting

    async def ask(self, tokens: int, timeout_s: float = QUEUE_S) -> asyncio.Task[Claim]:
        until = asyncio.get_running_loop().time() + timeout_s
        entry = self.queue.enter(ClientCall())
        claim = self.queue.claim(entry, tokens, 10, until, lambda worker: 0)
        task = asyncio.create_task(claim)
        await asyncio.sleep(0.01)
        return task


async def test_a_large_request_keeps_small_ones_from_its_worker_alone() -> None:
    asking = Asking(worker("prefill-0", LARGE), worker("decode-0", SMALL), worker("decode-1", LARGE))
    first = await (await asking.ask(500))
    assert first.decode.name == "decode-1"
    first.prefill_ended()
    large = await asking.ask(500)
    small = [await asking.ask(50) for _ in range(3)]
    assert [task.done() for task in (large, *small)] == [False, True, False, False]
    one = small[0].result()
    assert one.decode.name == "decode-0", "it is free, and no use to the large one"
    one.prefill_ended()
    first.release()
    await asyncio.sleep(0.01)
    assert large.result().decode.name == "decode-1", "before the small ones that came later"
    assert [task.done() for task in small[1:]] == [False, False]
    large.result().prefill_ended()
    one.release()
    large.result().release()
    await asyncio.sleep(0.01)
    placed = [task.result() for task in small[1:] if task.done()]
    assert placed
    for task in small[1:]:
        task.cancel()


async def test_a_long_prompt_keeps_short_ones_from_its_prefill_worker() -> None:
    """The prefill worker takes one prompt at a time; a decode worker has room all the time."""
    asking = Asking(worker("prefill-0", SMALL), worker("prefill-1", LARGE), worker("decode-0", LARGE, 9))
    first = await (await asking.ask(500))
    assert first.prefill.name == "prefill-1"
    long, short = await asking.ask(500), await asking.ask(50)
    assert (long.done(), short.done()) == (False, False), "the slot for the long one is kept, too"
    first.prefill_ended()
    await asyncio.sleep(0.01)
    assert long.result().prefill.name == "prefill-1"
    assert short.result().prefill.name == "prefill-0"


async def test_what_fits_no_worker_blocks_nobody_and_is_unavailable() -> None:
    asking = Asking(worker("prefill-0", LARGE), worker("decode-0", LARGE, 3))
    huge = await asking.ask(5000, 0.1)
    for _ in range(3):
        (await (await asking.ask(50))).prefill_ended()
    with pytest.raises(BatonError, match="serve a request of this size") as failed:
        await huge
    assert failed.value.kind is ErrorKind.UNAVAILABLE


async def test_what_fits_no_worker_is_placed_on_one_that_comes() -> None:
    asking = Asking(worker("prefill-0", LARGE), worker("decode-0", SMALL))
    large = await asking.ask(500)
    assert not large.done()
    asking.workers.append(worker("decode-1", LARGE))
    asking.placement.pools.review()
    asking.queue.place_waiting()
    await asyncio.sleep(0.01)
    assert large.result().decode.name == "decode-1"
