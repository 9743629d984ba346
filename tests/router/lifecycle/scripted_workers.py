"""A pair of workers whose every answer a test gives by hand: no server, no sockets, no timing.

The router's own `Worker`, `Claim` and `Cancels` stand before stubs that record each call and leave it open
until the test answers it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Generator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio

from baton.base.errors import BatonError
from baton.rpc.grpc_errors import to_status
from baton.v1.decode_pb2 import CancelResponse, SequenceOutput
from baton.v1.prefill_pb2 import PrefillResponse
from baton.v1.types_pb2 import Attempt, Logprobs, Sampling, WorkerIdentity, WorkerRole
from baton.v1.worker_pb2 import DescribeResponse, Load
from services.router.placement.claim import Claim
from services.router.request.request import Request
from services.router.workers.peer import Peer
from services.router.workers.token_stream import deliver
from services.router.workers.worker import Worker

REQUEST_ID = bytes(range(16))
PROMPT = (5, 6, 7)


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


def baton_error(error: BatonError) -> grpc.aio.AioRpcError:
    """An error as a worker's call raises it."""
    status = to_status(error)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details, None)


def logprobs_message(value: float) -> Logprobs:
    return Logprobs(logprob=value)


def a_request(**fields: Any) -> Request:
    """A request of three tokens for eight, a minute before its deadline."""
    known: dict[str, Any] = {
        "id": REQUEST_ID,
        "prompt_ids": PROMPT,
        "sampling": Sampling(seed=9),
        "max_tokens": 8,
        "stop_token_ids": (2,),
        "stop": (),
        "skip_special_tokens": True,
        "arrived_ns": time.monotonic_ns(),
    }
    if "deadline" not in fields:
        known["deadline"] = asyncio.get_running_loop().time() + 60
    return Request(**{**known, **fields})


class UnaryCall:
    """A call with one answer."""

    def __init__(self, request: Any, timeout: float | None) -> None:
        self.request, self.timeout = request, timeout
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(self, response: Any) -> None:
        """Ends the call with a response, or with an error."""
        if isinstance(response, BaseException):
            self._answer.set_exception(response)
        else:
            self._answer.set_result(response)

    def cancel(self) -> None:
        self._answer.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer.__await__()


class StreamCall:
    """A Prefill call whose responses and end the test decides."""

    def __init__(self, request: Any, timeout: float | None) -> None:
        self.request, self.timeout = request, timeout
        # Whether it was cancelled before it had ended.
        self.cut = False
        self._events: asyncio.Queue[PrefillResponse | BaseException | None] = asyncio.Queue()
        self._ended = False

    def emit(self, **fields: Any) -> None:
        self._events.put_nowait(PrefillResponse(**fields))

    def end(self, error: BaseException | None = None) -> None:
        """Ends the stream after the responses so far, well or with an error."""
        self._events.put_nowait(error)

    def done(self) -> bool:
        return self._ended

    def cancel(self) -> None:
        if not self._ended:
            self._ended = self.cut = True
            self._events.put_nowait(asyncio.CancelledError())

    async def __aiter__(self) -> AsyncIterator[PrefillResponse]:
        while isinstance(event := await self._events.get(), PrefillResponse):
            yield event
        self._ended = True
        if event is not None:
            raise event


class ScriptedPeer:
    """A worker's side of the wire. Every call is in `calls` by its method; one whose method is in `answers`
    is answered at once, any other by the test."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.answers: dict[str, Any] = {"Cancel": CancelResponse()}
        unary = ("Reserve", "GetHandoff", "Attach", "Cancel")
        self.decode = SimpleNamespace(**{name: self._unary(name) for name in unary})
        self.prefill = SimpleNamespace(ProvideTicket=self._unary("ProvideTicket"), Prefill=self._prefill)

    async def call(self, method: str, index: int = 0) -> Any:
        """The call number `index` of a method, as soon as it has been made."""
        for _ in range(1000):
            if len(self.calls[method]) > index:
                return self.calls[method][index]
            await asyncio.sleep(0)
        raise AssertionError(f"no {method} number {index}")

    def _unary(self, name: str) -> Any:
        def begin(request: Any, timeout: float | None = None) -> UnaryCall:
            call = UnaryCall(request, timeout)
            self.calls[name].append(call)
            if name in self.answers:
                call.answer(self.answers[name])
            return call

        return begin

    def _prefill(self, request: Any, timeout: float | None = None) -> StreamCall:
        self.calls["Prefill"].append(StreamCall(request, timeout))
        call: StreamCall = self.calls["Prefill"][-1]
        return call


def a_worker(name: str, role: WorkerRole.ValueType) -> tuple[Worker, ScriptedPeer]:
    """A worker that is ready, with eight slots, and its side of the wire."""
    peer = ScriptedPeer()
    described = DescribeResponse(
        identity=WorkerIdentity(name=name, incarnation=name.encode(), role=role),
        load=Load(slots=8, free_slots=8, blocks=10, free_blocks=10, block_tokens=16),
    )
    worker = Worker(cast("Peer", peer), described, lambda: None)
    worker.set_following(True)
    return worker, peer


class Pair:
    """A prefill worker and a decode worker, and what both report about the request."""

    def __init__(self, suffix: str = "0") -> None:
        self.prefill, self.prefill_peer = a_worker(f"prefill-{suffix}", WorkerRole.WORKER_ROLE_PREFILL)
        self.decode, self.decode_peer = a_worker(f"decode-{suffix}", WorkerRole.WORKER_ROLE_DECODE)

    def claim(self) -> Claim:
        return Claim(self.prefill, self.decode, tokens=3, reserved=11)

    @property
    def claimed(self) -> tuple[int, int, int]:
        """Slots and tokens reserved at decode, and tokens queued at prefill."""
        return self.decode.claimed_slots, self.decode.reserved_tokens, self.prefill.queued_tokens

    def output(self, attempt: int, first_number: int, ids: list[int], **fields: Any) -> None:
        """Delivers tokens as decode's stream would."""
        output = SequenceOutput(
            attempt=Attempt(request_id=REQUEST_ID, number=attempt),
            first_number=first_number,
            token_ids=ids,
            **fields,
        )
        deliver(self.decode, [output])


async def quiesced() -> None:
    """Lets every task run until all of them wait."""
    for _ in range(20):
        await asyncio.sleep(0)
