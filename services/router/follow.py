"""Holds open the stream on which a decode worker sends its tokens: one task a worker.

When it breaks it is opened again, and each sequence asks to have its output again from the
next number on (Attach). A worker that says that it ends is lost at once, one whose stream stays away
after `FOLLOW_GRACE_S`: that is how long its tickets live without us.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import AttachRequest, FollowRequest
from baton.v1.types_pb2 import Attempt
from services.common.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.v1.decode_pb2 import FollowResponse
    from services.router.sequence import Sequence
    from services.router.worker import Worker

FOLLOW_GRACE_S = 2.0
_OPEN_S = 2.0
_ATTACH_S = 2.0
# Sequences; a client's message takes about 30 µs.
AT_ONCE = 16
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5

# How a worker says that this start of it ends, or has ended.
_OVER = grpc.StatusCode.FAILED_PRECONDITION

_log = get_log("follow")


async def follow(worker: Worker, on_break: Callable[[], None]) -> None:
    """Delivers the worker's tokens until it is lost; cancel it to stop. `on_break`: an open stream ended."""
    loop = asyncio.get_running_loop()
    heard = loop.time()
    pause = _FIRST_PAUSE_S
    while not worker.lost:
        try:
            await _follow_once(worker)
        except (grpc.RpcError, TimeoutError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is _OVER:
                worker.lose(error.details() or "it was started again")
            _log.warning("follow_broke", worker=worker.name, error=type(error).__name__)
        finally:
            if worker.following:
                heard, pause = loop.time(), _FIRST_PAUSE_S
                on_break()
                worker.set_following(False)
                _expect_replay(worker)
        if loop.time() - heard > FOLLOW_GRACE_S:
            worker.lose("its token stream stayed away")
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _follow_once(worker: Worker) -> None:
    """One stream, from its opening to its end. Its initial metadata says that it is open."""
    meant = FollowRequest(router_id=worker.router_id, incarnation=worker.identity.incarnation)
    call = worker.peer.decode.Follow(meant)
    replay: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(_OPEN_S):
            await call.wait_for_connection()
        worker.set_following(True)
        replay = asyncio.create_task(_replay(worker))
        async for response in call:
            await _deliver(worker, response)
    finally:
        call.cancel()
        if replay is not None:
            replay.cancel()


async def _deliver(worker: Worker, response: FollowResponse) -> None:
    """Hands over one step's tokens, a few sequences at a time: between them the loop writes to those
    clients, and hears what else has come in."""
    for start in range(0, len(response.outputs), AT_ONCE):
        if start:
            await asyncio.sleep(0)
        worker.deliver(response.outputs[start : start + AT_ONCE])


def _expect_replay(worker: Worker) -> None:
    for sequence in worker.sequences.values():
        sequence.replaying = True


async def _replay(worker: Worker) -> None:
    """Has each sequence sent again from its next number; at the first opening there is none."""
    waiting = [(key, sequence) for key, sequence in worker.sequences.items() if sequence.replaying]
    await asyncio.gather(*(attach(worker, key, sequence) for key, sequence in waiting))


async def attach(worker: Worker, request_id: bytes, sequence: Sequence) -> bool:
    """Asks for a sequence's output from its next number on; False where it does not come.

    NOT_FOUND loses the attempt. Anything else leaves it as it is: decode may not have come to that
    number yet, or the stream breaks again and this is repeated.
    """
    attempt = Attempt(request_id=request_id, number=sequence.attempt)
    request = AttachRequest(router_id=worker.router_id, attempt=attempt, next_number=len(sequence.emitted))
    try:
        await worker.peer.decode.Attach(request, timeout=_ATTACH_S)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND and sequence.attempt == attempt.number:
            sequence.lose(BatonError(ErrorKind.UNAVAILABLE, f"{worker.name} lost the sequence"))
        return False
    return True
