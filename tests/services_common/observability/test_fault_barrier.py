"""A servicer's unexpected failure is one of its worker, not of the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from baton.base.errors import BatonError, ErrorKind
from services.common.errors import abort, from_grpc
from services.common.observability.fault_barrier import FaultBarrier
from services.common.rpc.grpc_server import GrpcServer

SECRET = "part of a prompt"


async def _fail(request: bytes, context: Any) -> bytes:
    if request == b"good":
        return request
    if request == b"refused":
        await abort(context, BatonError(ErrorKind.CONFLICT, "no"))
    raise OSError(24, SECRET)


async def _fail_later(request: bytes, context: Any) -> None:
    await context.write(b"one")
    if request != b"good":
        raise RuntimeError(SECRET)


async def _generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    server = GrpcServer(["test.Test"], interceptors=[FaultBarrier()])
    handlers = {
        "unary": grpc.unary_unary_rpc_method_handler(_fail),
        "stream": grpc.unary_stream_rpc_method_handler(_fail_later),
        "generator": grpc.unary_stream_rpc_method_handler(_generate),
    }
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1", 0)) as opened:
        yield opened
    await server.stop(0)


async def read(channel: Any, method: str, request: bytes) -> list[bytes]:
    if method == "unary":
        return [await channel.unary_unary("/test.Test/unary")(request, timeout=5)]
    return [message async for message in channel.unary_stream(f"/test.Test/{method}")(request, timeout=5)]


@pytest.mark.parametrize("method", ["unary", "stream"])
async def test_a_router_is_told_to_try_elsewhere_and_no_text_is_sent_or_logged(
    channel: Any, method: str
) -> None:
    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(channel, method, b"x")
            error = from_grpc(caught.value, "worker")
            assert (error.kind, error.message) == (ErrorKind.UNAVAILABLE, "worker: the worker failed")
    failed = [line for line in logged if line["event"] == "servicer_failed"]
    assert [line["method"] for line in failed] == [f"/test.Test/{method}"] * 2
    assert SECRET not in str(logged)


async def test_answers_and_refusals_pass(channel: Any) -> None:
    for method in ("unary", "stream", "generator"):
        assert len(await read(channel, method, b"good")) == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(channel, "unary", b"refused")
    assert from_grpc(caught.value, "worker").kind is ErrorKind.CONFLICT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/test.Test/nothing")(b"x", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
