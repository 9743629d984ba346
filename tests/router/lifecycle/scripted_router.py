"""A dispatcher with a queue, prefix affinity, journal, clock and workers that a test controls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.state import JournalRecord
from baton.state.journal import Receipt
from baton.v1.decode_pb2 import ReserveResponse, Ticket
from baton.v1.prefill_pb2 import FirstToken
from baton.v1.router_pb2 import Stage, StageTime
from baton.v1.types_pb2 import FinishReason
from services.router.lifecycle import attempt, request_lifecycle, timeline
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.outbox import Outbox, UnreadBudget
from services.router.lifecycle.request_lifecycle import LifecycleDeps
from services.router.queue.entry import QueueEntry
from services.router.request.request import Delta, Request
from services.router.text.detokenizer import Detokenizer
from services.router.text.output_text import OutputText
from services.router.workers.worker import Worker
from tests.router.conftest import byte_tokenizer
from tests.router.lifecycle.scripted_workers import (
    PROMPT,
    REQUEST_ID,
    Pair,
    a_request,
    baton_error,
    logprobs_message,
    quiesced,
    rpc_error,
)

ARRIVED_NS = 1_000_000_000
PLACE = (4, 2)
QUEUE_S = 7.0
TICKET = Ticket(body=b"a promise")
KV_BYTES = 640
PROMISE = ReserveResponse(ticket=TICKET, kv_bytes=KV_BYTES)
HASHES = (b"first block", b"second block")
NO_ROOM = rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
NO_BLOCKS = baton_error(BatonError(ErrorKind.OVERLOADED, "no blocks", cause=FailureCause.BLOCKS))
AWAY = rpc_error(grpc.StatusCode.UNAVAILABLE, "its words")
BROKEN = rpc_error(grpc.StatusCode.INTERNAL, "its words")
REFUSED = rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "its words")
TOKENIZER = byte_tokenizer()
STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
PREEMPTED = FinishReason.FINISH_REASON_PREEMPTED
CANCELLED = FinishReason.FINISH_REASON_CANCELLED
OWN = logprobs_message(-1)
REPORTED = OWN.SerializeToString()
# The output's first token, which is the text "a".
FIRST = FirstToken(number=0, token_id=97)


class Clock:
    """Stands in for the `time` module: it goes where the test puts it, in milliseconds since the arrival."""

    ms = 0

    def monotonic_ns(self) -> int:
        return ARRIVED_NS + self.ms * 1_000_000


@dataclass
class QueueCall:
    """A request for a place: for a pair, or (without `max_tokens`) for a prefill worker alone."""

    entry: QueueEntry
    tokens: int
    max_tokens: int | None
    until: float
    fresh: bool
    cached: Any = None


@dataclass
class ScriptedQueue:
    """A waiting queue: the test decides when a request is placed, and on which workers."""

    timeout_s: float = QUEUE_S
    asked: list[QueueCall] = field(default_factory=list)
    # Client calls that entered, and of each its limits, the seconds since it came, and its deadline;
    # positions that were refused by a worker; and positions that ended.
    arrived: list[Any] = field(default_factory=list)
    limits: list[tuple[Any, float, float]] = field(default_factory=list)
    refusals: list[tuple[Any, Any]] = field(default_factory=list)
    # What was asked for another pair: where attempts failed, tokens to compute, and in all.
    elsewhere: list[tuple[Any, int, int]] = field(default_factory=list)
    over: list[Any] = field(default_factory=list)
    claims: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def enter(self, call: Any, slo: Any, waited_s: float, deadline: float) -> QueueEntry:
        self.arrived.append(call)
        self.limits.append((slo, waited_s, deadline))
        return QueueEntry(call, PLACE)

    async def claim(self, entry: QueueEntry, tokens: int, left: int, until: float, cached: Any) -> Any:
        return await self._asked(QueueCall(entry, tokens, left, until, not entry.returning, cached))

    async def claim_prefill(self, entry: QueueEntry, tokens: int, until: float) -> Any:
        return await self._asked(QueueCall(entry, tokens, None, until, not entry.returning))

    async def _asked(self, call: QueueCall) -> Any:
        self.asked.append(call)
        call.entry.number = 1
        return await self._placed()

    async def _placed(self) -> Any:
        claim = await self.claims.get()
        if isinstance(claim, BaseException):
            raise claim
        return claim

    def refused(self, entry: QueueEntry, worker: Any) -> None:
        self.refusals.append((entry.position, worker))

    def has_other_pair(self, entry: QueueEntry, computed: int, total: int) -> bool:
        self.elsewhere.append((list(entry.failed), computed, total))
        return True

    def ended(self, entry: QueueEntry) -> None:
        self.over.append(entry.position)


class ScriptedBlocks:
    """A prompt's block hashes, which are the same for every worker."""

    def hashes_for(self, worker: Worker) -> tuple[bytes, ...]:
        assert isinstance(worker, Worker)
        return HASHES


@dataclass
class ScriptedPrefixes:
    """Records what is reported to the prefix affinity."""

    prompt: ScriptedBlocks = field(default_factory=ScriptedBlocks)
    hashed: list[Any] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    sent: list[tuple[str, Any]] = field(default_factory=list)
    # Outputs that a worker has decoded to the end: its name and their tokens.
    outputs: list[tuple[str, list[int]]] = field(default_factory=list)
    error: Exception | None = None

    async def hash_prompt(self, token_ids: Any, tenant: str = "") -> ScriptedBlocks:
        self.hashed.append(token_ids)
        self.tenants.append(tenant)
        if self.error is not None:
            raise self.error
        return self.prompt

    def cached_tokens(self, worker: Worker, prompt: Any) -> tuple[Worker, Any]:
        return worker, prompt

    def prompt_sent(self, worker: Worker, prompt: Any) -> None:
        self.sent.append((worker.name, prompt))

    def output_ended(self, worker: Worker, prompt: Any, prompt_ids: Any, output: list[int]) -> None:
        assert (prompt, prompt_ids) == (self.prompt, PROMPT)
        self.outputs.append((worker.name, list(output)))


@dataclass
class ScriptedJournal:
    """A journal that acknowledges at once."""

    opened: list[Any] = field(default_factory=list)
    # What was opened, and in how many seconds each expires.
    records: list[tuple[JournalRecord, float]] = field(default_factory=list)
    marked: list[tuple[bytes, int]] = field(default_factory=list)
    closed: list[bytes] = field(default_factory=list)

    def append(self, record: Any, left_s: float) -> Receipt:
        self.opened.append(record.request_id)
        self.records.append((record, left_s))
        return Receipt(acknowledged=True)

    def mark_attempt(self, request_id: bytes, number: int) -> None:
        self.marked.append((request_id, number))

    def close(self, request_id: bytes) -> None:
        self.closed.append(request_id)


class ScriptedRouter:
    """Runs one request over scripted workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_attempts: int = 3) -> None:
        self.clock = Clock()
        monkeypatch.setattr(timeline, "time", self.clock)
        monkeypatch.setattr(request_lifecycle, "time", self.clock)
        monkeypatch.setattr(attempt, "HEAD_START_S", 0)
        self.queue, self.prefixes, self.journal = ScriptedQueue(), ScriptedPrefixes(), ScriptedJournal()
        self.observations = Observations()
        queue: Any = self.queue
        prefixes: Any = self.prefixes
        journal: Any = self.journal
        self.deps = LifecycleDeps(
            queue,
            Cancels(),
            max_attempts,
            self.observations,
            prefixes,
            UnreadBudget(10**6),
            lambda request: OutputText(request, Detokenizer(TOKENIZER)),
            journal,
        )
        self.dispatcher = Dispatcher(self.deps)

    @contextlib.asynccontextmanager
    async def running(self, request: Request) -> AsyncIterator[Outbox]:
        """The request runs until it waits for the test."""
        async with self.dispatcher.run(request, asyncio.Event()) as outbox:
            await quiesced()
            yield outbox

    async def place(self, pair: Pair) -> None:
        """The request gets this pair."""
        self.queue.claims.put_nowait(pair.claim())
        await quiesced()

    async def promise(self, pair: Pair, index: int = 0, answer: Any = PROMISE) -> None:
        """Decode answers Reserve number `index`."""
        (await pair.decode_peer.call("Reserve", index)).answer(answer)
        await quiesced()

    async def prefilling(self, pair: Pair, index: int = 0) -> Any:
        """The request gets this pair, and its slot; returns prefill's call."""
        await self.place(pair)
        await self.promise(pair, index)
        return await pair.prefill_peer.call("Prefill", index)


def a_pair(suffix: str = "0", *, sure: bool = False) -> Pair:
    """`sure`: its decode worker surely has room, so prompts go ahead of their tickets."""
    pair = Pair(suffix)
    pair.decode.others.other_router_slots = 0 if sure else 1
    pair.prefill_peer.answers["ProvideTicket"] = None
    return pair


def failure(outbox: Outbox) -> BatonError:
    """The error that the client gets once it has read everything else."""
    try:
        while outbox.take() is not None:
            pass
    except BatonError as error:
        return error
    raise AssertionError("it has not failed")


def rest_of(outbox: Outbox) -> Delta:
    """The last delta, which ends the output."""
    delta = outbox.take()
    assert delta is not None
    assert delta.finish is not None, "the output has not ended"
    assert outbox.take() is None
    return delta


def request_of(**fields: Any) -> Request:
    return a_request(arrived_ns=ARRIVED_NS, **fields)


def stages(**offsets_ms: int) -> list[StageTime]:
    return [
        StageTime(stage=Stage.Value(f"STAGE_{name.upper()}"), offset_ns=offset * 1_000_000)
        for name, offset in offsets_ms.items()
    ]


def ended(logged: Any) -> dict[str, Any]:
    """The line that a request leaves in the log."""
    (line,) = [dict(line) for line in logged if line["event"] == "request_ended"]
    return line


def line_of(**fields: Any) -> dict[str, Any]:
    """The log line of a request that never got anywhere, with what differs."""
    return {
        "event": "request_ended",
        "part": "request",
        "log_level": "info",
        "request": REQUEST_ID.hex(),
        "stage": "ended",
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "attempts": 1,
        "prefill": "",
        "decode": "",
        "kv_bytes": 0,
        **fields,
    }


def warned(logged: Any) -> list[dict[str, Any]]:
    """The log lines besides that of the request's end."""
    mine = ("attempt_failed", "request_failed", "request_internal_error")
    return [dict(line) for line in logged if line["event"] in mine]


def attempt_failed(number: int, reason: str, kind: str = "UNAVAILABLE") -> dict[str, Any]:
    return {
        "event": "attempt_failed",
        "part": "dispatch",
        "log_level": "warning",
        "request": REQUEST_ID.hex(),
        "attempt": number,
        "kind": kind,
        "reason": reason,
    }
