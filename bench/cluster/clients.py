"""Clients of a cluster over gRPC: closed loops beside fake engines, and bursts beside real ones.

Closed loops record the time of each message and parse it afterwards, so that the clients' own work during a
run is only receiving; the load is steady: each client starts at a random point of a request, and continues
until all have their counted requests. Bursts are prompts first, then decode alone until the first of them
ends; and single requests, whose trace reports the handoff.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import WorkerRole
from baton.v1.worker_pb2 import GetAuditRequest, RecentSteps
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from bench.cluster.fake_engine import age_ms
from bench.model_folders import VOCAB
from bench.processes import METADATA, worker_reports

_GENERATE = "/baton.v1.RouterService/Generate"
_CALL_S = 180.0
# A client waits up to this long before each request.
_PAUSE_S = 0.5
# The worker's integrity report covers the last second; slightly more, so that it lies within the window.
_SECOND_S = 1.05
# Tokens after the last stream has joined that are not counted.
_WARM_UP = 4
# Output tokens of a single request: enough for its handoff to be known.
_ALONE_TOKENS = 32


@dataclass(slots=True)
class Call:
    """One request: when it was sent, and each message with its arrival time.

    `counted`: sent while all clients were running.
    """

    sent_ns: int
    counted: bool
    messages: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class Seen:
    """The counted requests of one round; times in milliseconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    ring_to_client: list[float] = field(default_factory=list)
    tokens: int = 0
    messages: int = 0

    @classmethod
    def of(cls, calls: Sequence[Call], output_len: int) -> Seen:
        """Raises RuntimeError where a stream was cut short."""
        seen = cls()
        for call in calls:
            if call.counted:
                seen._add(call, output_len)
        return seen

    def _add(self, call: Call, output_len: int) -> None:
        times: list[int] = []
        for came_ns, data in call.messages:
            message = GenerateResponse.FromString(data)
            # Token 0 comes from prefill, not from a ring.
            numbered = enumerate(message.token_ids, message.first_number)
            self.ring_to_client += [age_ms(token, came_ns) for number, token in numbered if number]
            times += [came_ns] * len(message.token_ids)
            self.messages += bool(message.token_ids)
        if len(times) != output_len:
            raise RuntimeError(f"{len(times)} tokens came instead of {output_len}")
        self.ttft.append((times[0] - call.sent_ns) / 1e6)
        self.tpot.append((times[-1] - times[0]) / 1e6 / (len(times) - 1))
        self.tokens += len(times)


class Clients:
    """`streams` clients on one channel."""

    def __init__(self, channel: grpc.aio.Channel, model: str, prompt: int, output_len: int) -> None:
        self._generate = channel.unary_stream(
            _GENERATE, request_serializer=GenerateRequest.SerializeToString, response_deserializer=None
        )
        self._model = model
        self._prompt = prompt
        self._output_len = output_len

    async def run(self, streams: int, requests: int) -> list[Call]:
        """Runs the clients; returns all calls in the order of their sending.

        A first request of random length desynchronises the clients; then `requests` of each are counted.
        """
        calls: list[Call] = []
        unfinished = streams

        async def one() -> None:
            nonlocal unfinished
            await self._send(calls, random.randint(1, self._output_len), counted=False)
            for _ in range(requests):
                await self._send(calls, self._output_len, counted=True)
            unfinished -= 1
            while unfinished:
                await self._send(calls, self._output_len, counted=False)

        await asyncio.gather(*(one() for _ in range(streams)))
        return sorted(calls, key=lambda call: call.sent_ns)

    async def _send(self, calls: list[Call], output_len: int, *, counted: bool) -> None:
        await asyncio.sleep(random.random() * _PAUSE_S)
        ids = [random.randrange(VOCAB) for _ in range(self._prompt)]
        request = GenerateRequest(
            model=self._model,
            token_ids=TokenIds(ids=ids),
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
        )
        call = Call(time.monotonic_ns(), counted)
        async for data in self._generate(request, timeout=_CALL_S):
            call.messages.append((time.monotonic_ns(), data))
        calls.append(call)


@dataclass(slots=True)
class Stream:
    """One request at its client: the time of sending and of each token in seconds, and the exposed part of
    its handoff."""

    sent: float
    came: list[float] = field(default_factory=list)
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Together:
    """The streams of `prompt` tokens while all of them decoded and none was prefilled."""

    prompt: int
    streams: Sequence[Stream]

    @property
    def window(self) -> tuple[float, float]:
        """The time from some tokens after the last stream has joined to the end of the first."""
        begun = max(stream.came[1 + _WARM_UP] for stream in self.streams)
        return begun, min(stream.came[-1] for stream in self.streams)

    def figures(self) -> dict[str, Any]:
        """Raises RuntimeError without such a window."""
        begin, end = self.window
        inside = [
            [(number, at) for number, at in enumerate(stream.came) if begin <= at <= end]
            for stream in self.streams
        ]
        if end <= begin or min(map(len, inside)) < 2:
            raise RuntimeError("the first stream ended before the last had joined: ask for longer outputs")
        spans = [(stream[-1][1] - stream[0][1]) / (stream[-1][0] - stream[0][0]) for stream in inside]
        gaps = np.concatenate([np.diff([at for _, at in stream]) for stream in inside])
        numbers = [number for stream in inside for number, _ in stream]
        first = [stream.came[0] - stream.sent for stream in self.streams]
        return {
            "streams": len(self.streams),
            "prompt": self.prompt,
            "mean_context": round(self.prompt + float(np.mean(numbers))),
            "window_s": round(end - begin, 3),
            "tokens": len(numbers),
            "tpot_ms": _ms(np.mean(spans)),
            "itl_p50_ms": _ms(np.percentile(gaps, 50)),
            "itl_p99_ms": _ms(np.percentile(gaps, 99)),
            "burst_ttft_p50_ms": _ms(np.median(first)),
            "burst_ttft_max_ms": _ms(max(first)),
        }


class Bursts:
    """Sends both kinds to a router's public gRPC port; `admin` is the address of its AdminService."""

    def __init__(self, channel: grpc.aio.Channel, admin: str, model: str, vocab: int) -> None:
        self._admin = admin
        self._router = RouterServiceStub(channel)
        self._model = model
        self._vocab = vocab

    async def warm(self, count: int, prompt: int, output: int) -> None:
        """An uncounted burst, which opens links and fills caches."""
        joined = asyncio.Semaphore(0)
        await asyncio.gather(*(self._stream(prompt, output, joined) for _ in range(count)))

    async def run(self, count: int, prompt: int, output: int) -> dict[str, Any]:
        """Figures of one burst, with the decode engine's own step times. Raises RuntimeError where a stream
        is cut short."""
        address = await self._decode_address()
        joined = asyncio.Semaphore(0)
        recent = asyncio.create_task(self._recent(address, joined, count))
        try:
            streams = await asyncio.gather(*(self._stream(prompt, output, joined) for _ in range(count)))
            steps = await recent
        finally:
            recent.cancel()
        own = {"steps": steps.steps, "mean_ms": round(steps.mean_ms, 3), "p99_ms": round(steps.p99_ms, 3)}
        rows = round(steps.tokens / steps.steps, 2) if steps.steps else 0.0
        return {**Together(prompt, streams).figures(), "engine": {**own, "rows": rows}}

    async def one_by_one(self, count: int, prompt: int) -> dict[str, Any]:
        """`count` prompts, one at a time: TTFT, and the exposed part of their handoffs. A trace lacks that
        part where the last token reached the router before prefill's report. Raises RuntimeError where all
        lack it.
        """
        joined = asyncio.Semaphore(0)
        streams = [await self._stream(prompt, _ALONE_TOKENS, joined) for _ in range(count)]
        exposed = [stream.exposed_s for stream in streams if stream.exposed_s]
        if not exposed:
            raise RuntimeError("no trace has a handoff")
        ttft = [stream.came[0] - stream.sent for stream in streams]
        share = np.median(exposed) / np.median(ttft)
        return {
            "requests": count, "prompt": prompt,
            "ttft_p50_ms": _ms(np.median(ttft)), "ttft_p99_ms": _ms(np.percentile(ttft, 99)),
            "exposed_p50_ms": _ms(np.median(exposed)), "exposed_p99_ms": _ms(np.percentile(exposed, 99)),
            "exposed_share_percent": round(float(share) * 100, 2),
        }  # fmt: skip

    async def _stream(self, prompt: int, output: int, joined: asyncio.Semaphore) -> Stream:
        ids = [random.randrange(self._vocab) for _ in range(prompt)]
        request = GenerateRequest(
            model=self._model, token_ids=TokenIds(ids=ids), temperature=0, max_tokens=output, ignore_eos=True
        )
        stream = Stream(time.perf_counter())
        async for message in self._router.Generate(request, timeout=_CALL_S):
            was = len(stream.came)
            stream.came += [time.perf_counter()] * len(message.token_ids)
            stream.exposed_s = message.trace.handoff_exposed_ns / 1e9
            if was <= 1 + _WARM_UP < len(stream.came):
                joined.release()
        if len(stream.came) != output:
            raise RuntimeError(f"{len(stream.came)} tokens came instead of {output}")
        return stream

    async def _recent(self, address: str, joined: asyncio.Semaphore, count: int) -> RecentSteps:
        """The decode worker's integrity report a second after all have joined."""
        for _ in range(count):
            await joined.acquire()
        await asyncio.sleep(_SECOND_S)
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await WorkerServiceStub(channel).GetAudit(
                GetAuditRequest(skip_integrity=True), timeout=10, metadata=METADATA
            )
        recent: RecentSteps = answer.report.recent_decode
        return recent

    async def _decode_address(self) -> str:
        address: str = next(
            worker.address
            for worker in await worker_reports(self._admin)
            if worker.identity.role != WorkerRole.WORKER_ROLE_PREFILL
        )
        return address


def _ms(seconds: float | np.floating[Any]) -> float:
    return round(float(seconds) * 1e3, 3)
