"""Cancels attempts at decode workers, in the background.

A cancel is repeated until the worker has answered or is lost, for `GIVE_UP_S` at most. A lost worker is
asked once, since it may only have been unreachable; if it is found again, it ends what it runs for this
router's former id. The attempt's claim is released only after the cancel, because the worker holds the slot
until then; so there are never more cancels than slots. An attempt that sends output although no request waits
for it is an orphan, and is cancelled too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from baton.v1.decode_pb2 import CancelRequest
from baton.v1.types_pb2 import Attempt
from services.common.observability.logs import get_log
from services.router.placement.claim import Claim
from services.router.workers.worker import Worker

_CALL_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
GIVE_UP_S = 60.0
# A cancel takes effect one decode step after its answer; output until then is no reason to repeat it.
_TAKES_EFFECT_S = 1.0

_log = get_log("cancels")


class Cancels:
    """Sends and repeats this router's cancels, and counts them."""

    def __init__(self, give_up_s: float = GIVE_UP_S) -> None:
        self._give_up_s = give_up_s
        self._tasks: set[asyncio.Task[None]] = set()
        # Attempts that are being cancelled, or were less than `_TAKES_EFFECT_S` ago, with their number of
        # cancels.
        self._recent: dict[tuple[bytes, bytes, int], int] = {}
        # Since the start: all cancels, those of orphans, and those that were never answered.
        self.sent = 0
        self.orphans = 0
        self.unanswered = 0

    @property
    def pending(self) -> int:
        """Cancels that are not answered yet."""
        return len(self._tasks)

    def send(self, claim: Claim, attempt: Attempt) -> None:
        """Cancels the attempt at the claim's decode worker, then releases the claim."""
        self._start(claim.decode, attempt, claim.release)

    def cancel_orphan(self, worker: Worker, attempt: Attempt) -> None:
        """Cancels an attempt that no request of this router waits for, unless that is under way already."""
        if _key(worker, attempt) in self._recent:
            return
        self.orphans += 1
        _log.warning("orphan_cancelled", worker=worker.name, request=attempt.request_id.hex())
        self._start(worker, attempt, lambda: None)

    async def drain(self, timeout_s: float) -> None:
        """Waits for pending cancels at most `timeout_s`, then drops them."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _start(self, worker: Worker, attempt: Attempt, release: Callable[[], None]) -> None:
        self.sent += 1
        key = _key(worker, attempt)
        self._recent[key] = self._recent.get(key, 0) + 1
        task = asyncio.create_task(self._run(worker, attempt, release))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, worker: Worker, attempt: Attempt, release: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(self._give_up_s):
                await _cancel_until_answered(worker, attempt)
        except TimeoutError:
            self.unanswered += 1
            _log.warning("cancel_unanswered", worker=worker.name, request=attempt.request_id.hex())
        finally:
            release()
            asyncio.get_running_loop().call_later(_TAKES_EFFECT_S, self._forget, _key(worker, attempt))

    def _forget(self, key: tuple[bytes, bytes, int]) -> None:
        self._recent[key] -= 1
        if not self._recent[key]:
            del self._recent[key]


def _key(worker: Worker, attempt: Attempt) -> tuple[bytes, bytes, int]:
    return worker.router_id, attempt.request_id, attempt.number


async def _cancel_until_answered(worker: Worker, attempt: Attempt) -> None:
    pause = _FIRST_PAUSE_S
    while not (await _cancel(worker, attempt) or worker.lost):
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _cancel(worker: Worker, attempt: Attempt) -> bool:
    try:
        await worker.peer.decode.Cancel(CancelRequest(attempt=attempt), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        # Any other status is the worker's answer; repeating would not change it.
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True
