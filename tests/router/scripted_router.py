"""A dispatcher whose waiting room, prefix names, journal, clock and workers a test plays by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.errors import BatonError
from baton.state.journal import Receipt
from baton.v1.decode_pb2 import ReserveResponse, Ticket
from baton.v1.prefill_pb2 import FirstToken
from baton.v1.router_pb2 import Stage, StageTime
from baton.v1.types_pb2 import FinishReason
from services.router.lifecycle import observations
from services.router.lifecycle import request_lifecycle as life
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.outbox import Outbox
from services.router.lifecycle.request_lifecycle import LifecycleDeps
from services.router.lifecycle.unread import Unread
from services.router.request.request import Delta, Request
from services.router.text.detokenizer import Detokenizer
from services.router.text.output_text import OutputText
from services.router.workers.worker import Worker
from tests.router.conftest import byte_tokenizer
from tests.router.scripted_workers import REQUEST_ID, Pair, a_request, logprobs_message, rpc_error, settled

ARRIVED_NS = 1_000_000_000
PLACE = (4, 2)
ROOM_S = 7.0
TICKET = Ticket(body=b"a promise")
KV_BYTES = 640
PROMISE = ReserveResponse(ticket=TICKET, kv_bytes=KV_BYTES)
NAMES = (b"first block", b"second block")
NO_ROOM = rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
AWAY = rpc_error(grpc.StatusCode.UNAVAILABLE, "its words")
BROKEN = rpc_error(grpc.StatusCode.INTERNAL, "its words")
TOKENIZER = byte_tokenizer()
STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
MOVED = FinishReason.FINISH_REASON_PREEMPTED
CANCELLED = FinishReason.FINISH_REASON_CANCELLED
OWN = logprobs_message(-1)
SAID = OWN.SerializeToString()
# The output's first token, which is the text "a".
FIRST = FirstToken(number=0, token_id=97)


class Clock:
    """Stands in for the `time` module: it goes where the test puts it, in milliseconds since the arrival."""

    ms = 0

    def monotonic_ns(self) -> int:
        return ARRIVED_NS + self.ms * 1_000_000


@dataclass
class Asked:
    """A request for a place: for a pair, or (without `max_tokens`) for a prefill worker alone."""

    place: Any
    call: Any
    tokens: int
    max_tokens: int | None
    until: float
    fresh: bool
    cached: Any = None


@dataclass
class Room:
    """The waiting room: the test says whom it places, and with whom."""

    timeout_s: float = ROOM_S
    asked: list[Asked] = field(default_factory=list)
    # Client calls that took a place; places that found no room at a worker; and places that are over.
    arrived: list[Any] = field(default_factory=list)
    refusals: list[tuple[Any, Any]] = field(default_factory=list)
    over: list[Any] = field(default_factory=list)
    claims: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def next_place(self, call: Any) -> Any:
        self.arrived.append(call)
        return PLACE

    async def claim(
        self, place: Any, call: Any, tokens: int, left: int, until: float, *, fresh: bool, cached: Any
    ) -> Any:
        self.asked.append(Asked(place, call, tokens, left, until, fresh, cached))
        return await self._placed()

    async def claim_prefill(self, place: Any, call: Any, tokens: int, until: float, *, fresh: bool) -> Any:
        self.asked.append(Asked(place, call, tokens, None, until, fresh))
        return await self._placed()

    async def _placed(self) -> Any:
        claim = await self.claims.get()
        if isinstance(claim, BaseException):
            raise claim
        return claim

    def refused(self, place: Any, worker: Any) -> None:
        self.refusals.append((place, worker))

    def ended(self, place: Any) -> None:
        self.over.append(place)


class Named:
    """A prompt's names, which are the same for every worker."""

    def of(self, worker: Worker) -> tuple[bytes, ...]:
        assert isinstance(worker, Worker)
        return NAMES


@dataclass
class PrefixNames:
    """What of prompts is said to the prefix view."""

    prompt: Named = field(default_factory=Named)
    hashed: list[Any] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)
    error: Exception | None = None

    async def name(self, token_ids: Any) -> Named:
        self.hashed.append(token_ids)
        if self.error is not None:
            raise self.error
        return self.prompt

    def cached_tokens(self, worker: Worker, prompt: Any) -> tuple[Worker, Any]:
        return worker, prompt

    def sent(self, worker: Worker, prompt: Any) -> None:
        self.told.append((worker.name, prompt))


@dataclass
class JournalBook:
    """A journal that acknowledges at once."""

    opened: list[Any] = field(default_factory=list)
    marked: list[tuple[bytes, int]] = field(default_factory=list)
    closed: list[bytes] = field(default_factory=list)

    def append(self, record: Any, left_s: float) -> Receipt:
        self.opened.append(record.request_id)
        return Receipt(acknowledged=True)

    def mark_attempt(self, request_id: bytes, number: int) -> None:
        self.marked.append((request_id, number))

    def close(self, request_id: bytes) -> None:
        self.closed.append(request_id)


class ScriptedRouter:
    """Runs one request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_attempts: int = 3) -> None:
        self.clock = Clock()
        monkeypatch.setattr(life, "time", self.clock)
        monkeypatch.setattr(observations, "time", self.clock)
        monkeypatch.setattr(life, "_HEAD_START_S", 0)
        self.room, self.prefixes, self.journal = Room(), PrefixNames(), JournalBook()
        self.observations = Observations()
        room: Any = self.room
        prefixes: Any = self.prefixes
        journal: Any = self.journal
        self.deps = LifecycleDeps(
            room, Cancels(), max_attempts, self.observations, prefixes, Unread(10**6), journal
        )
        self.dispatcher = Dispatcher(self.deps)

    @contextlib.asynccontextmanager
    async def running(self, request: Request) -> AsyncIterator[Outbox]:
        """The request runs until it waits for the test."""
        text = OutputText(request, Detokenizer(TOKENIZER))
        async with self.dispatcher.run(request, text, asyncio.Event()) as outbox:
            await settled()
            yield outbox

    async def place(self, pair: Pair) -> None:
        """The request gets this pair."""
        self.room.claims.put_nowait(pair.claim())
        await settled()

    async def promise(self, pair: Pair, index: int = 0, answer: Any = PROMISE) -> None:
        """Decode answers Reserve number `index`."""
        (await pair.decode_peer.call("Reserve", index)).answer(answer)
        await settled()

    async def prefilling(self, pair: Pair, index: int = 0) -> Any:
        """The request gets this pair, and its slot; returns prefill's call."""
        await self.place(pair)
        await self.promise(pair, index)
        return await pair.prefill_peer.call("Prefill", index)


def a_pair(suffix: str = "0", *, sure: bool = False) -> Pair:
    """`sure`: its decode worker surely has room, so prompts go ahead of their tickets."""
    pair = Pair(suffix)
    pair.decode.foreign_slots = 0 if sure else 1
    pair.prefill_peer.answers["GiveTicket"] = None
    return pair


def failure(outbox: Outbox) -> BatonError:
    """What the client is told once it has read all else."""
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
    """What the log says beside the request's end."""
    mine = ("attempt_failed", "request_failed", "life_failed")
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
