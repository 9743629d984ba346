"""Thousands of random requests to both ports before fake workers.

Both APIs give the same answer to a request that both can express: the same kind of refusal for the same
field, or the same text. Whatever comes, no answer is a server's error but 503 with Retry-After, and nothing
stays held.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.rpc.grpc_errors import from_status
from baton.v1.router_pb2 import GenerateResponse
from services.common.errors import http_status
from services.router.workers import directory
from tests.router.conftest import Site, SiteMaker
from tests.router.fuzz.asks import Ask, draw_ask
from tests.router.fuzz.noise import draw_body, draw_message
from tests.router.http_client import http

# Requests at once. More would wait for slots, and a queue that is full is another verdict.
AT_ONCE = 8
_PER_SITE = 1500
KINDS = ("http", "grpc", "http noise", "grpc noise")
_GENERATE = "/baton.v1.RouterService/Generate"
# What a request may be answered with besides success, over HTTP and over gRPC.
_REFUSALS = {400, 404, 413}
_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}
# Fields whose names differ between the APIs.
_NAMES = {
    "messages": "prompt",
    "top_logprobs": "logprobs",
    "chat": "prompt",
    "structured_outputs": "grammar",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict on a request: a kind of error and its field, or the texts of its outputs."""

    kind: ErrorKind | None
    param: str | None = None
    texts: tuple[str, ...] = ()


@dataclass
class Fuzz:
    """One run, and what it counted."""

    here: Site
    client: httpx.AsyncClient
    generate: Any
    counts: Counter[str] = field(default_factory=Counter)

    async def compare(self, draw: random.Random) -> None:
        """Asks both APIs for the same."""
        ask = draw_ask(draw)
        over_http, over_grpc = await asyncio.gather(self._by_http(ask), self._by_grpc(ask))
        if any(verdict.kind is not None and verdict.kind.retryable for verdict in (over_http, over_grpc)):
            self.counts["to be tried again"] += 2  # the machine was busy for seconds: no verdict
            return
        self.counts["http ok" if over_http.kind is None else "http refused"] += 1
        self.counts["grpc ok" if over_grpc.kind is None else "grpc refused"] += 1
        assert over_http == over_grpc, ask

    async def noise_http(self, draw: random.Random) -> None:
        """Sends a body that is often wrong."""
        path, body = draw_body(draw)
        answer = await self.client.post(path, content=body, headers={"content-type": "application/json"})
        status = answer.status_code
        self.counts[f"http noise {'ok' if status == 200 else 'refused'}"] += 1
        assert status in (200, *_REFUSALS) or (status == 503 and "retry-after" in answer.headers), (
            status,
            path,
            body[:500],
            answer.text[:500],
        )

    async def noise_grpc(self, draw: random.Random) -> None:
        """Sends bytes that are often no message."""
        data = draw_message(draw)
        code, _ = await self._call(data)
        self.counts[f"grpc noise {'ok' if code is grpc.StatusCode.OK else 'refused'}"] += 1
        assert code in _CODES, (code, data[:500])

    async def _by_http(self, ask: Ask) -> Verdict:
        answer = await self.client.post(ask.path, content=ask.body())
        document = answer.json()
        if answer.status_code == 200:
            chat = ask.prompt_kind == "chat"
            texts = [one["message"]["content"] if chat else one["text"] for one in document["choices"]]
            return Verdict(None, texts=tuple(texts))
        kinds = [kind for kind in ErrorKind if http_status(BatonError(kind, "")) == answer.status_code]
        param = document["error"]["param"]
        return Verdict(kinds[0], _NAMES.get(param, param))

    async def _by_grpc(self, ask: Ask) -> Verdict:
        code, found = await self._call(ask.message().SerializeToString())
        if code is grpc.StatusCode.OK:
            texts: dict[int, str] = {}
            for response in found:
                texts[response.index] = texts.get(response.index, "") + response.text
            return Verdict(None, texts=tuple(texts[index] for index in sorted(texts)))
        param = found.param if isinstance(found, FieldError) else None
        return Verdict(found.kind, _NAMES.get(param or "", param))

    async def _call(self, data: bytes) -> tuple[grpc.StatusCode, Any]:
        """The code, and the responses or the error."""
        call = self.generate(data, timeout=30)
        try:
            return grpc.StatusCode.OK, [GenerateResponse.FromString(part) async for part in call]
        except grpc.aio.AioRpcError as error:
            metadata: Any = error.trailing_metadata() or ()
            return error.code(), from_status(error.code(), error.details(), metadata)


async def run(site: SiteMaker, count: int, seed: int) -> Counter[str]:
    """Sends `count` requests, in four equal parts: the same to both APIs, and noise to each. At intervals
    router and workers are replaced by new ones, for fakes forget nothing and become slow."""
    counts: Counter[str] = Counter()
    numbers = range(count * 3 // 4)
    for start in range(0, len(numbers), _PER_SITE):
        counts += await _run_part(site, numbers[start : start + _PER_SITE], seed)
    return counts


async def _run_part(site: SiteMaker, part: range, seed: int) -> Counter[str]:
    async with (
        site(prefill=1, decode=1, slots=256, max_waiting=4096) as here,
        http(here) as client,
        grpc.aio.insecure_channel(here.addresses["grpc"]) as channel,
    ):
        here.worker("decode-0").behaviour.step_s = 0.001
        client.timeout = httpx.Timeout(60)
        method: Any = channel.unary_stream(_GENERATE, None, None)
        fuzz = Fuzz(here, client, method)
        kinds: list[Callable[[random.Random], Awaitable[None]]] = [
            fuzz.compare,
            fuzz.noise_http,
            fuzz.noise_grpc,
        ]
        numbers = iter(part)

        async def work() -> None:
            for number in numbers:
                await kinds[number % 3](random.Random(f"{seed} {number}"))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())
        await here.quiet()
        answer = await client.post("/v1/completions", content=json.dumps({"model": "fake", "prompt": "a"}))
        assert answer.status_code == 200
    return fuzz.counts


@pytest.fixture(autouse=True)
def unhurried_heart(site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share this process with all else, and are not lost when it is busy."""
    monkeypatch.setattr(directory, "HEARTBEAT_S", 2.0)


async def test_both_apis_agree_and_none_fails(site: SiteMaker) -> None:
    counts = await run(site, 400, seed=1)
    assert counts.total() == 400
    assert all(counts[f"{kind} {end}"] > 10 for kind in KINDS for end in ("ok", "refused")), counts


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_200_000_requests(site: SiteMaker) -> None:
    counts = await run(site, 200_000, seed=2)
    print(f"fuzz: {dict(counts)}")
    assert counts.total() == 200_000
