"""A steady load of greedy requests over gRPC and HTTP, whose answers are known."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton.base.errors import BatonError
from baton.client import AsyncClient
from baton.client.tls import Tls

_NAME = "demo-baton"
_MODEL = "baton-demo"
_ANSWER_S = 60.0
_APIS = ("grpc", "http")
_ASKED = (
    ("What is Baton?", 8),
    ("The router places a request on two workers. " * 6, 12),
    ("Once upon a time", 60),
    ("A KV block holds the keys and values of sixteen tokens. " * 20, 6),
)


@dataclass(frozen=True)
class Endpoint:
    """The addresses of the public Service; `certificates`: folder with ca.crt and the client's tls.crt and
    tls.key where it speaks TLS; `api_key`: None where clients need none."""

    address: str
    http_port: int
    grpc_port: int
    certificates: Path | None
    api_key: str | None

    def grpc_client(self) -> AsyncClient:
        folder = self.certificates
        tls = None
        if folder is not None:
            tls = Tls(folder / "ca.crt", folder / "tls.crt", folder / "tls.key", server_name=_NAME)
        return AsyncClient(f"{self.address}:{self.grpc_port}", model=_MODEL, tls=tls, api_key=self.api_key)

    def http_client(self) -> httpx.AsyncClient:
        folder = self.certificates
        scheme, context = "http", ssl.create_default_context()
        if folder is not None:
            scheme, context = "https", ssl.create_default_context(cafile=folder / "ca.crt")
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        url = f"{scheme}://{self.address}:{self.http_port}"
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return httpx.AsyncClient(base_url=url, timeout=_ANSWER_S, verify=context, headers=headers)


@dataclass(slots=True)
class Load:
    """Asks until its block ends. Every answer must be the one that was given before."""

    endpoint: Endpoint
    expected: dict[tuple[str, int], str]
    pause_s: float
    answered: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    _over: bool = False

    async def _ask_on(self, api: str, ask: Callable[[str, int], Awaitable[str]]) -> None:
        """One client: the next request once the last is answered."""
        while not self._over:
            for prompt, tokens in _ASKED:
                try:
                    text = await ask(prompt, tokens)
                except Exception as error:
                    self.failed.append(f"{api}: {error!r}")
                else:
                    if text == self.expected[prompt, tokens]:
                        self.answered[api] += 1
                    else:
                        self.failed.append(f"{api}: another answer: {text!r}")
                await asyncio.sleep(self.pause_s)

    async def over_grpc(self) -> None:
        async with self.endpoint.grpc_client() as client:
            await self._ask_on("grpc", lambda prompt, tokens: _over_grpc(client, prompt, tokens))

    async def over_http(self) -> None:
        async with self.endpoint.http_client() as client:
            await self._ask_on("http", lambda prompt, tokens: _over_http(client, prompt, tokens))

    async def goes_on(self) -> None:
        """Waits until each API has answered one more request, or has failed to."""
        before = Counter(self.answered)
        async with asyncio.timeout(2 * _ANSWER_S):
            while not (self.failed or all(self.answered[api] > before[api] for api in _APIS)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def end(self) -> None:
        self._over = True


async def _over_grpc(client: AsyncClient, prompt: str, tokens: int) -> str:
    completion = await client.complete(
        prompt, deadline=_ANSWER_S, max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    return completion.text


async def _over_http(client: httpx.AsyncClient, prompt: str, tokens: int) -> str:
    asked = {"model": _MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    named = {"sni_hostname": _NAME}
    answer = await client.post("/v1/completions", json=asked, headers={"host": _NAME}, extensions=named)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def refusals(endpoint: Endpoint) -> set[str]:
    """The errors with which a request is refused over each API."""
    found = set()
    async with endpoint.grpc_client() as client, endpoint.http_client() as http:
        for name, asked in (("grpc", _over_grpc(client, "Hello", 1)), ("http", _over_http(http, "Hello", 1))):
            try:
                await asked
            except (BatonError, AssertionError) as error:
                found.add(f"{name}: {error}")
    return found


async def answers(endpoint: Endpoint) -> dict[tuple[str, int], str]:
    """The answers that are given now, alike over both APIs."""
    found = {}
    async with endpoint.grpc_client() as client, endpoint.http_client() as http:
        for prompt, tokens in _ASKED:
            found[prompt, tokens] = await _over_grpc(client, prompt, tokens)
            assert await _over_http(http, prompt, tokens) == found[prompt, tokens]
    return found


@contextlib.asynccontextmanager
async def steady_load(endpoint: Endpoint, clients: int, pause_s: float) -> AsyncIterator[Load]:
    """Runs beside the block, with `clients` clients of each API, which pause between two requests. At its end
    no request has failed, and each API has answered some."""
    load = Load(endpoint, await answers(endpoint), pause_s)
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(load.over_grpc())
            group.create_task(load.over_http())
        try:
            yield load
        finally:
            load.end()
    print(f"\nPROOF answered under load: {dict(load.answered)}, failed: {len(load.failed)}")
    assert not load.failed, load.failed[:5]
    assert {*_APIS} == {*load.answered}
