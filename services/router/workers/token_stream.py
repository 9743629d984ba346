"""Holds open the stream on which a decode worker sends its tokens: one task a worker.

When it breaks it is opened again, and the request names the next number of each sequence, so that no token
comes twice. A worker that reports the end of this start of it is lost at once. One that is silent is given up
by `Worker.judge`, whether its stream is open or not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import AttachRequest, SubscribeRequest, Position
from baton.v1.types_pb2 import Attempt
from services.common.observability.logs import get_log
from services.router.workers.worker_error import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from baton.v1.decode_pb2 import SubscribeResponse
    from services.router.request.output_state import Sequence
    from services.router.workers.worker import Worker

_OPEN_S = 2.0
_ATTACH_S = 2.0
# Sequences; a client's message takes about 30 µs.
AT_ONCE = 16
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5

# The status by which a worker reports that this start of it ends, or has ended.
_OVER = grpc.StatusCode.FAILED_PRECONDITION

_log = get_log("follow")


async def follow(worker: Worker, on_break: Callable[[], None]) -> None:
    """Delivers the worker's tokens until it is lost; cancel it to stop. `on_break`: an open stream ended."""
    pause = _FIRST_PAUSE_S
    while not worker.lost:
        try:
            await _follow_once(worker)
        except BatonError:
            return  # it was lost
        except (grpc.RpcError, TimeoutError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is _OVER:
                worker.lose(error.details() or "it was started again")
            _log.warning("follow_broke", worker=worker.name, error=type(error).__name__)
        finally:
            if worker.following:
                pause = _FIRST_PAUSE_S
                on_break()
                worker.set_following(False)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _follow_once(worker: Worker) -> None:
    """One stream, from its opening to its end. Its initial metadata says that it is open."""
    request = SubscribeRequest(
        router_id=worker.router_id,
        incarnation=worker.identity.incarnation,
        positions=_positions(worker),
        former_router_ids=worker.former_router_ids,
    )
    call = worker.peer.decode.Subscribe(request)
    try:
        with worker.while_alive(call):
            async with asyncio.timeout(_OPEN_S):
                await call.wait_for_connection()
            worker.set_following(True)
            async for response in call:
                worker.tokens.heard()
                _lose_unknown(worker, response.unknown)
                await _deliver(worker, response)
    finally:
        call.cancel()


def _positions(worker: Worker) -> list[Position]:
    """Where the sequences stand that the worker has promised a slot; of one whose Reserve is on its way it
    may not know yet."""
    return [
        Position(
            attempt=Attempt(request_id=request_id, number=sequence.attempt),
            next_number=len(sequence.emitted),
        )
        for request_id, sequence in worker.sequences.items()
        if sequence.reserved
    ]


def _lose_unknown(worker: Worker, unknown: Iterable[Attempt]) -> None:
    for attempt in unknown:
        sequence = worker.sequences.get(attempt.request_id)
        if sequence is not None and sequence.attempt == attempt.number:
            sequence.lose(WorkerError(ErrorKind.UNAVAILABLE, worker.name, "it lost the sequence"))


async def _deliver(worker: Worker, response: SubscribeResponse) -> None:
    """Hands over one step's tokens, a few sequences at a time: between them the loop writes to those
    clients, and takes in what else has come."""
    for start in range(0, len(response.outputs), AT_ONCE):
        if start:
            await asyncio.sleep(0)
        worker.deliver(response.outputs[start : start + AT_ONCE])


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
            sequence.lose(WorkerError(ErrorKind.UNAVAILABLE, worker.name, "it has lost the sequence"))
        return False
    return True
