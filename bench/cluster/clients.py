"""Closed-loop clients over gRPC that record the time of each message and parse it afterwards.

So the clients' own work during a run is only receiving. The load is steady: each client starts at a random
point of a request, and continues until all have their counted requests.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, TokenIds
from bench.cluster.fake_engine import age_ms
from bench.cluster.fake_model_folder import VOCAB

_GENERATE = "/baton.v1.RouterService/Generate"
_CALL_S = 120.0
# A client waits up to this long before each request.
_PAUSE_S = 0.5


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
