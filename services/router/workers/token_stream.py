"""The stream on which a decode worker sends its tokens: one task for each worker.

When it breaks it is opened again. The request contains the next token number of each sequence, so that no
token comes twice. A worker that reports the end of its incarnation is lost at once; one that is silent is
lost by `Worker.check_liveness`, whether its stream is open or not. While its stream lives, the worker is
asked after each attempt that has been silent for long (`SilentAttempts`): one that it has lost is lost here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Position, SequenceOutput, SubscribeRequest, SubscribeResponse
from baton.v1.types_pb2 import Attempt
from services.common.observability.logs import get_log
from services.router.workers.silent_attempts import SilentAttempts
from services.router.workers.worker import Worker
from services.router.workers.worker_error import WorkerError

_OPEN_S = 2.0
# Sequences delivered at once; writing a client's message takes about 30 µs.
BATCH = 16
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5

# The status with which a worker reports that this incarnation ends or has ended.
_OVER = grpc.StatusCode.FAILED_PRECONDITION

_log = get_log("follow")


async def follow(worker: Worker, on_break: Callable[[], None]) -> None:
    """Delivers the worker's tokens until it is lost. `on_break` is called when an open stream has ended."""
    asking = asyncio.create_task(SilentAttempts(worker).watch())
    try:
        await _follow(worker, on_break)
    finally:
        asking.cancel()


async def _follow(worker: Worker, on_break: Callable[[], None]) -> None:
    pause = _FIRST_PAUSE_S
    while not worker.lost:
        try:
            await _follow_once(worker)
        except BatonError:
            return  # it was lost
        except (grpc.RpcError, TimeoutError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is _OVER:
                worker.lose(error.details() or "it was started again")
            _log.warning("token_stream_broken", worker=worker.name, error=type(error).__name__)
        finally:
            if worker.following:
                pause = _FIRST_PAUSE_S
                on_break()
                worker.set_following(False)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _follow_once(worker: Worker) -> None:
    """Runs one stream until it ends. It is open once its initial metadata has come."""
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
                worker.tokens.reset()
                _lose_unknown(worker, response.unknown)
                await _deliver(worker, response)
    finally:
        call.cancel()


def _positions(worker: Worker) -> list[Position]:
    """The next numbers of the sequences with a reservation. The worker may not know the others yet."""
    return [
        Position(
            attempt=Attempt(request_id=request_id, number=output.attempt),
            next_number=len(output.emitted),
        )
        for request_id, output in worker.outputs.items()
        if output.reserved
    ]


def _lose_unknown(worker: Worker, unknown: Iterable[Attempt]) -> None:
    for attempt in unknown:
        output = worker.outputs.get(attempt.request_id)
        if output is not None and output.attempt == attempt.number:
            output.lose(WorkerError(ErrorKind.UNAVAILABLE, worker.name, "it lost the sequence"))


async def _deliver(worker: Worker, response: SubscribeResponse) -> None:
    """Delivers the tokens of one step in batches; between them the loop writes to those clients and reads
    what else has arrived."""
    for start in range(0, len(response.outputs), BATCH):
        if start:
            await asyncio.sleep(0)
        deliver(worker, response.outputs[start : start + BATCH])


def deliver(worker: Worker, outputs: Iterable[SequenceOutput]) -> None:
    """Reports tokens to their outputs. An attempt that no output waits for is reported as an orphan."""
    for output in outputs:
        attempt = output.attempt
        waiting = worker.outputs.get(attempt.request_id)
        if waiting is not None and waiting.attempt == attempt.number:
            waiting.accept_decoded(output)
        elif not output.finish_reason:
            worker.on_orphan(worker, attempt)
