"""Only callers with the cluster's secret may call a worker, whatever the kind of call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.base.cluster_auth import METADATA_KEY, RpcToken, link_key
from baton.base.errors import ErrorKind
from services.common.errors import from_grpc
from services.common.rpc.grpc_server import GrpcServer, channel_options
from services.common.rpc.internal_rpc import internal_channel

SECRET = "a secret of some length"
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
# As what a call without the token fails. A client that still writes may lose the server's status.
_REFUSED = {
    shape: {ErrorKind.UNAUTHENTICATED} | ({ErrorKind.UNAVAILABLE} if shape.startswith("stream") else set())
    for shape in SHAPES
}


async def _unary(request: bytes, context: object) -> bytes:
    return request


async def _stream(request: object, context: Any) -> None:
    await context.write(b"one")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = GrpcServer(["test.Test"], SECRET)
    handlers = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(_unary),
        "unary_stream": grpc.unary_stream_rpc_method_handler(_stream),
        "stream_unary": grpc.stream_unary_rpc_method_handler(_unary_of_stream),
        "stream_stream": grpc.stream_stream_rpc_method_handler(_stream),
    }
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


async def _unary_of_stream(requests: object, context: object) -> bytes:
    return b"one"


async def call(
    channel: grpc.aio.Channel, shape: str, messages: Sequence[bytes] = (b"x",), **options: Any
) -> None:
    started = getattr(channel, shape)(f"/test.Test/{shape}")(
        iter(messages) if shape.startswith("stream") else messages[0], timeout=5, **options
    )
    if shape.endswith("stream"):
        async for _ in started:
            pass
    else:
        await started


def kind(error: grpc.aio.AioRpcError) -> ErrorKind:
    return from_grpc(error, "").kind


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_call_needs_the_token(address: str, shape: str) -> None:
    async with internal_channel(address, channel_options(), SECRET) as ours:
        await call(ours, shape)
    for secret in ("", "another secret of that length"):
        async with internal_channel(address, channel_options(), secret) as strange:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(strange, shape)
            assert kind(refused.value) in _REFUSED[shape]


@pytest.mark.parametrize("shape", ["stream_unary", "stream_stream"])
async def test_a_refusal_while_the_client_writes_is_no_internal_error(address: str, shape: str) -> None:
    """grpc.aio reports INTERNAL for a write that fails behind the server's status, in some of these calls."""
    found = set()
    async with internal_channel(address, channel_options(), "") as strange:
        for _ in range(60):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(strange, shape, [bytes(16384)] * 8)
            found.add(kind(refused.value))
    assert found <= _REFUSED[shape]


async def test_the_secret_itself_and_invalid_tokens_are_refused(address: str) -> None:
    wrong = (SECRET, "", RpcToken(SECRET).metadata[0][1][:-1], link_key(SECRET).hex())
    async with grpc.aio.insecure_channel(address) as channel:
        for value in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, "unary_unary", metadata=((METADATA_KEY, value),))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_check_needs_no_token_but_watch_does(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in health.Watch(health_pb2.HealthCheckRequest(), timeout=5):
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_token_does_not_reveal_the_secret() -> None:
    token = RpcToken(SECRET).metadata[0][1]
    assert SECRET not in token
    assert link_key(SECRET).hex() != token
    assert RpcToken(SECRET).admits("/x", [(METADATA_KEY, token)])
    assert RpcToken(SECRET).admits("/x", [("other", "x"), (METADATA_KEY, token.encode())])
    assert not RpcToken(SECRET).admits("/x", None)
    assert not RpcToken(SECRET).admits("/x", [(METADATA_KEY, "é")])
