"""Asks a decode worker after attempts that have been silent for long while its token stream lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from baton.base.errors import ErrorKind
from baton.v1.decode_pb2 import AttachRequest
from baton.v1.types_pb2 import Attempt
from services.router.workers.worker import AttemptOutput, Worker
from services.router.workers.worker_error import WorkerError

# How long an attempt is silent before the worker is asked after it; then after twice as long each time. A
# prompt may be computed for minutes, or a sequence wait for blocks.
SILENT_S = 5.0
LOOK_S = 1.0
# The most that the time between two looks counts: what came while this process did not run is still to be
# read.
_LONGEST_LOOK_S = 2 * LOOK_S
_ATTACH_S = 2.0


@dataclass(slots=True)
class _Silence:
    """The silence of one attempt since its last token, and after how long the worker is asked, in seconds."""

    attempt: int
    emitted: int
    ask_at_s: float
    silent_s: float = 0.0


class SilentAttempts:
    """The attempts of one worker that have a slot and send nothing."""

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._worker = worker
        self._clock = clock
        self._looked_at = clock()
        self._silences: dict[bytes, _Silence] = {}

    async def watch(self) -> None:
        """Looks once a second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for request_id, output in self.due():
                await attach(self._worker, request_id, output)

    def due(self) -> list[tuple[bytes, AttemptOutput]]:
        """The requests that the worker is to be asked after now, with the outputs of their attempts."""
        now = self._clock()
        since, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        due, silences = [], {}
        for request_id, output in self._worker.outputs.items():
            if not output.reserved:
                continue
            known = self._silences.get(request_id)
            if known is None or (known.attempt, known.emitted) != (output.attempt, len(output.emitted)):
                known = _Silence(output.attempt, len(output.emitted), SILENT_S)
            elif self._worker.following:
                known.silent_s += since
                if known.silent_s >= known.ask_at_s:
                    known.ask_at_s *= 2
                    due.append((request_id, output))
            silences[request_id] = known
        self._silences = silences
        return due


async def attach(worker: Worker, request_id: bytes, output: AttemptOutput) -> bool:
    """Requests a sequence's output from its next number on. False if that failed.

    NOT_FOUND fails the attempt. Other errors do not: decode may not have reached that number yet, or the
    stream breaks again and this call is repeated.
    """
    attempt = Attempt(request_id=request_id, number=output.attempt)
    request = AttachRequest(router_id=worker.router_id, attempt=attempt, next_number=len(output.emitted))
    try:
        await worker.peer.decode.Attach(request, timeout=_ATTACH_S)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND and output.attempt == attempt.number:
            output.lose(WorkerError(ErrorKind.UNAVAILABLE, worker.name, "it has lost the sequence"))
        return False
    return True
