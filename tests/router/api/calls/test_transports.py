"""Both APIs treat methods, sizes, keys, deadlines and refusals that may be retried alike."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.base.errors import ErrorKind
from services.common.config.tls import Auth
from tests.router.api.both_apis import both_apis, kind_of
from tests.router.api.inputs.bad_inputs import body, message
from tests.router.conftest import SiteMaker, until

KEY = "sk-of-a-caller"


async def test_transports(site: SiteMaker) -> None:
    """Methods, content types, encodings and sizes."""
    async with both_apis(site, max_body_bytes=70_000) as both:
        assert (await both.client.get("/v1/completions")).status_code == 405
        unknown: Any = both.channel.unary_unary("/baton.v1.RouterService/Nothing", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await unknown(b"", timeout=5)
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert (await both.post("form", body(), **form)).status_code == 415
        packed = await both.post("gzip", gzip.compress(body()), **{"content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["error"]["type"]) == (415, "invalid_request_error")
        assert (await both.post("identity", body(), **{"content-encoding": "identity"})).status_code == 200
        assert (await both.post("large", body(odd="x" * 80_000))).status_code == 413
        large = await both.generate("large", message(text="x" * 80_000))
        assert large is not None
        assert large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await both.post("headers", body(), **{"x-a": "a" * 20_000})).status_code == 431
        metadata = await both.generate("headers", message(), metadata=(("x-a", "a" * 40_000),))
        assert metadata is not None
        assert metadata.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_keys(site: SiteMaker, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    async with both_apis(site, auth=Auth(api_keys_file=tmp_path / "keys")) as both:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await both.post("key", body(), **headers)).status_code == 401
            error = await both.generate("key", message(), metadata=tuple(headers.items()))
            assert error is not None
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        query = await both.post("query", body(), path=f"/v1/completions?api_key={KEY}")
        assert query.status_code == 401


async def test_strict_fields(site: SiteMaker) -> None:
    async with both_apis(site, strict_fields=True) as both:
        assert (await both.post("odd", body(odd=1))).status_code == 400
        error = await both.generate("odd", message() + b"\xe8\x04\x01")
        assert error is not None
        assert kind_of(error) is ErrorKind.INVALID


async def test_what_may_be_retried_is_marked(site: SiteMaker) -> None:
    """No worker alive, and a queue that is full."""
    async with both_apis(site, slots=1, max_waiting=1, queue_timeout_s=5) as both:
        here, waits = both.here, []
        here.worker("decode-0").behaviour.step_s = 0.05
        busy = body(prompt=[1, 2, 3], max_tokens=100, ignore_eos=True)
        full: Callable[[], bool] = lambda: here.router.queue.waiting == 1  # noqa: E731
        for _ in range(2):
            waits.append(asyncio.create_task(both.post("busy", busy)))
        await until(full)
        refused = await both.post("full", body())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        error = await both.generate("full", message())
        assert error is not None
        assert kind_of(error) is ErrorKind.OVERLOADED
        for one in waits:
            one.cancel()
        await asyncio.wait(waits)
    async with both_apis(site, prefill=0, decode=0, queue_timeout_s=0.1) as none:
        refused = await none.post("none", body())
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        error = await none.generate("none", message())
        assert error is not None
        assert kind_of(error).retryable


async def test_a_deadline_that_is_past(site: SiteMaker) -> None:
    async with both_apis(site) as both:
        error = await both.generate("late", message(), timeout=1e-6)
        assert error is not None
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert both.here.worker("prefill-0").prefill.prompts == []
