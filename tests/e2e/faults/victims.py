"""Clients that go away: each knows when, over which API and how, and says how far it had come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import httpx

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from tests.e2e.support.cluster import MODEL

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

LIMIT_S = 60.0


class Way(Enum):
    """The way in which a client leaves."""

    CANCEL = "gRPC call cancelled"
    DEADLINE = "gRPC deadline"
    CLOSE_STREAM = "HTTP connection closed while streaming"
    CLOSE_WHOLE = "HTTP connection closed while waiting for the whole answer"


@dataclass(frozen=True)
class Victim:
    """A request that is given up: after `after_s`, or at its `at_token`-th token if that comes first."""

    way: Way
    prompt: tuple[int, ...]
    max_tokens: int
    after_s: float
    at_token: int | None = None

    @classmethod
    def draw(cls, dice: random.Random, vocab_size: int) -> Victim:
        """Long prompts meet their end in the queue or in prefill, the others in decode or at its very end."""
        way = dice.choice(list(Way))
        long = dice.random() < 0.4
        length = dice.randint(700, 1200) if long else dice.randint(1, 80)
        prompt = tuple(dice.randrange(vocab_size) for _ in range(length))
        max_tokens = dice.randint(40, 250)
        by_token = not long and way in (Way.CANCEL, Way.CLOSE_STREAM)
        at_token = dice.choice([1, 2, max_tokens // 2, max_tokens - 1, max_tokens]) if by_token else None
        return cls(way, prompt, max_tokens, LIMIT_S if by_token else dice.uniform(0.0, 0.7), at_token)

    async def run(self, stub: RouterServiceAsyncStub, url: str) -> int | None:
        """Asks and goes away. How many tokens it had seen (whole answers: 0), None if answered first."""
        if self.way is Way.CANCEL:
            return await self._cancel(stub)
        if self.way is Way.DEADLINE:
            return await self._deadline(stub)
        # A client of its own: closing it closes the connection. (Certificates would cost 50 ms a client.)
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, verify=False) as client:
            return await (self._stream(client) if self.way is Way.CLOSE_STREAM else self._whole(client))

    def _request(self) -> GenerateRequest:
        ids = TokenIds(ids=self.prompt)
        return GenerateRequest(
            model=MODEL, token_ids=ids, max_tokens=self.max_tokens, temperature=0, ignore_eos=True
        )

    def _body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    async def _cancel(self, stub: RouterServiceAsyncStub) -> int | None:
        call = stub.Generate(self._request(), timeout=LIMIT_S)
        seen = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.after_s):
                async for message in call:
                    seen += len(message.token_ids)
                    if message.finish_reason and self.at_token is None:
                        return None
                    if self.at_token is not None and seen >= self.at_token:
                        break
        call.cancel()
        return seen

    async def _deadline(self, stub: RouterServiceAsyncStub) -> int | None:
        seen = 0
        try:
            async for message in stub.Generate(self._request(), timeout=max(0.001, self.after_s)):
                seen += len(message.token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return seen
        return None

    async def _stream(self, client: httpx.AsyncClient) -> int | None:
        seen = 0
        try:
            async with asyncio.timeout(self.after_s):
                body = {**self._body(), "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200, await response.aread()
                    async for line in response.aiter_lines():
                        seen += _tokens(line)
                        if self.at_token is not None and seen >= self.at_token:
                            return seen
        except TimeoutError:
            return seen
        return None

    async def _whole(self, client: httpx.AsyncClient) -> int | None:
        try:
            async with asyncio.timeout(self.after_s):
                response = await client.post("/v1/completions", json=self._body())
        except TimeoutError:
            return 0
        assert response.status_code == 200, response.text
        return None


def _tokens(line: str) -> int:
    data = line.removeprefix("data: ")
    if not data or data == "[DONE]":
        return 0
    return sum(len(choice["token_ids"]) for choice in json.loads(data)["choices"])
