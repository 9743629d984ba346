"""Tells decode workers, beside the way, that an attempt is over.

Each runs until the worker has answered or `_GIVE_UP_S` has passed. A lost worker is asked once, since
it may only have been out of reach; what it still runs has no router any more and ends by itself. The
attempt's claim is released only then, since the worker holds the slot until then: there are never more
of these than slots.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.v1.decode_pb2 import CancelRequest
from services.common.logs import get_log

if TYPE_CHECKING:
    from baton.v1.types_pb2 import Attempt
    from services.router.placement import Claim
    from services.router.worker import Worker

_CALL_S = 1.0
_PAUSE_S = 0.1
_GIVE_UP_S = 5.0

_log = get_log("cancels")


class Cancels:
    """The cancels that are on their way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        # Since the start: all, and those given up without an answer.
        self.sent = 0
        self.unanswered = 0

    @property
    def pending(self) -> int:
        """How many are not answered yet."""
        return len(self._tasks)

    def send(self, claim: Claim, attempt: Attempt) -> None:
        """Cancels the attempt at the claim's decode worker, then releases the claim."""
        self.sent += 1
        task = asyncio.create_task(self._run(claim, attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, timeout_s: float) -> None:
        """Waits for all of them, then drops the rest."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _run(self, claim: Claim, attempt: Attempt) -> None:
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                await _cancel_until_answered(claim.decode, attempt)
        except TimeoutError:
            self.unanswered += 1
            _log.warning("cancel_unanswered", worker=claim.decode.name, request=attempt.request_id.hex())
        finally:
            claim.release()


async def _cancel_until_answered(worker: Worker, attempt: Attempt) -> None:
    while True:
        if await _cancel(worker, attempt) or worker.lost:
            return
        await asyncio.sleep(_PAUSE_S)


async def _cancel(worker: Worker, attempt: Attempt) -> bool:
    try:
        await worker.peer.decode.Cancel(CancelRequest(attempt=attempt), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        # The worker is there and has judged: asking again changes nothing.
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True
