"""A client of both APIs of a site, which sends bodies and messages as bytes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx

from baton.base.errors import ErrorKind
from baton.rpc.grpc_errors import from_status
from tests.router.conftest import Site, SiteMaker
from tests.router.http_client import http

JSON = {"content-type": "application/json"}


@dataclass
class Apis:
    """Both APIs of a site; `slowest` has the time of each refusal in milliseconds."""

    here: Site
    client: httpx.AsyncClient
    channel: grpc.aio.Channel
    slowest: dict[str, float] = field(default_factory=dict)

    async def post(self, name: str, data: bytes, path: str = "", **headers: str) -> httpx.Response:
        where = path or ("/v1/chat/completions" if b'"messages"' in data[:40] else "/v1/completions")
        began = time.perf_counter()
        answer = await self.client.post(where, content=data, headers={**JSON, **headers})
        self.slowest[f"http {name}"] = (time.perf_counter() - began) * 1e3
        return answer

    async def generate(self, name: str, data: bytes, **options: Any) -> grpc.aio.AioRpcError | None:
        """The error of a call; None if it succeeds."""
        method: Any = self.channel.unary_stream("/baton.v1.RouterService/Generate", None, None)
        began = time.perf_counter()
        try:
            async for _ in method(data, **{"timeout": 30, **options}):
                pass
        except grpc.aio.AioRpcError as error:
            self.slowest[f"grpc {name}"] = (time.perf_counter() - began) * 1e3
            return error
        return None


@asynccontextmanager
async def both_apis(site: SiteMaker, **settings: Any) -> AsyncIterator[Apis]:
    async with (
        site(**settings) as here,
        http(here) as client,
        grpc.aio.insecure_channel(
            here.addresses["grpc"], options=[("grpc.max_send_message_length", -1)]
        ) as channel,
    ):
        yield Apis(here, client, channel)


def kind_of(error: grpc.aio.AioRpcError) -> ErrorKind:
    metadata: Any = error.trailing_metadata() or ()
    return from_status(error.code(), error.details(), metadata).kind
