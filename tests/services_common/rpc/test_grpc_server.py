"""A server's health, reflection, limits and port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.base.errors import BatonError, ErrorKind
from services.common.config.router import ConnectionLimits
from services.common.errors import abort, from_grpc
from services.common.rpc.grpc_server import (
    MAX_MESSAGE_BYTES,
    UNREAD_BYTES,
    GrpcServer,
    channel_options,
    public_options,
)

NAME = "baton.v1.WorkerService"


async def _echo_size(data: bytes, context: object) -> bytes:
    return len(data).to_bytes(8, "big")


async def _fail(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    await abort(context, BatonError(ErrorKind.QUARANTINED, "not now"))


def server(options: Sequence[tuple[str, int]] = ()) -> GrpcServer:
    made = GrpcServer([NAME], options=options)
    handlers = {
        "Size": grpc.unary_unary_rpc_method_handler(_echo_size),
        "Fail": grpc.unary_unary_rpc_method_handler(_fail),
    }
    made.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    return made


async def test_health_follows_set_serving() -> None:
    made = server()
    address = await made.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True, False):
            await made.set_serving(serving)
            for name in ("", NAME):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is serving
    await made.stop(0)


async def test_reflection_lists_the_services() -> None:
    made = server()
    address = await made.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names
        call.cancel()
    await made.stop(0)


async def test_large_messages_and_typed_errors() -> None:
    made = server()
    address = await made.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        size = channel.unary_unary("/test.Test/Size", bytes, bytes)
        assert int.from_bytes(await size(bytes(MAX_MESSAGE_BYTES - 64)), "big") == MAX_MESSAGE_BYTES - 64
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Test/Fail", bytes, bytes)(b"")
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert from_grpc(caught.value, "peer").kind is ErrorKind.QUARANTINED
    await made.stop(0)


async def test_a_port_is_never_shared() -> None:
    first, second = server(), server()
    address = await first.start("127.0.0.1", 0)
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(BatonError, match="already in use") as caught:
        await second.start("127.0.0.1", port)
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    await first.stop(0)
    await second.stop(0)


async def test_a_burst_of_calls_waits_for_the_loop() -> None:
    """More calls than gRPC would keep by default, which come while the loop is busy (making them)."""
    made = server(public_options(ConnectionLimits(), 16, 65_536))
    address = await made.start("127.0.0.1", 0)
    calls = []
    async with (
        grpc.aio.insecure_channel(address, options=channel_options()) as one,
        grpc.aio.insecure_channel(address, options=channel_options()) as two,
    ):
        for channel in (one, two):
            await channel.channel_ready()
            call = channel.unary_unary("/test.Test/Size", None, None)
            calls += [call(b"x", timeout=30) for _ in range(650)]
        codes = await asyncio.gather(*(call.code() for call in calls))
    await made.stop(0)
    assert set(codes) == {grpc.StatusCode.OK}


async def test_what_is_not_read_waits_at_the_server() -> None:
    """The server's writes wait for the reader; by default gRPC would take all of them."""
    size, sent = 1024, 0

    async def numbers(data: bytes, context: object) -> AsyncIterator[bytes]:
        nonlocal sent
        for sent in range(1, 201):
            yield sent.to_bytes(size, "big")

    made = server()
    handlers = {"Numbers": grpc.unary_stream_rpc_method_handler(numbers)}
    made.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.More", handlers),))
    address = await made.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = channel.unary_stream("/test.More/Numbers", None, None)(b"", timeout=30)
        messages = aiter(call)
        read = [await anext(messages) for _ in range(20)]
        before = -1
        while sent > before:
            before = sent
            await asyncio.sleep(0.2)
        assert size * (sent - len(read)) < 4 * UNREAD_BYTES  # and what is being written and read
        read += [message async for message in messages]
    await made.stop(0)
    assert [int.from_bytes(message, "big") for message in read] == list(range(1, 201))
