"""Bounds of what a connection to the public gRPC listener may cost."""

from __future__ import annotations

import asyncio
import socket
import time

import grpc
import grpc.aio
import pytest

from baton.v1.router_pb2 import ListModelsRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from tests.router.conftest import SiteMaker, ids_request, tokens_of, until
from tests.router.raw_http import silent


def is_open(one: socket.socket) -> bool:
    """True if the peer has not closed the connection, whatever it sent before."""
    one.setblocking(False)
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


async def test_silent_connections_are_few_and_end(site: SiteMaker) -> None:
    limits = {"max_grpc_connections": 12, "head_timeout_s": 1.0}
    async with site(connections=limits) as here:
        started = time.monotonic()
        held = await asyncio.to_thread(silent, here.addresses["grpc"], 40, "127.0.0.2")
        try:
            await asyncio.sleep(0.3)
            assert sum(map(is_open, held)) <= 12
            await until(lambda: not any(map(is_open, held)), 5)
            assert time.monotonic() - started >= 1.0
            async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
                models = RouterServiceStub(channel).ListModels(
                    ListModelsRequest(), timeout=5, wait_for_ready=True
                )
                assert (await models).models
        finally:
            for one in held:
                one.close()


async def test_idle_connections_are_closed_and_opened_again(site: SiteMaker) -> None:
    async with site(connections={"idle_timeout_s": 0.5}) as here:
        async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
            stub = RouterServiceStub(channel)
            await stub.ListModels(ListModelsRequest(), timeout=5)
            state = grpc.ChannelConnectivity
            assert channel.get_state() is state.READY
            async with asyncio.timeout(5):
                await channel.wait_for_state_change(state.READY)
            await stub.ListModels(ListModelsRequest(), timeout=5)
        here.worker("decode-0").behaviour.step_s = 0.05
        assert len(await here.generate(ids_request([1, 2], 20))) > 1  # longer than the limit


async def test_metadata_has_a_limit(site: SiteMaker) -> None:
    async with site() as here, grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
        stub = RouterServiceStub(channel)
        await stub.ListModels(ListModelsRequest(), metadata=[("x", "a" * 8_000)], timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(ListModelsRequest(), metadata=[("x", "a" * 20_000)], timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_old_connection_ends_after_its_calls(site: SiteMaker) -> None:
    """A stream goes on for several times that age; later calls get connections of their own."""
    async with site(connections={"max_connection_age_s": 0.2}) as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        assert len(tokens_of(await here.generate(ids_request([1, 2], 20)))) == 20
        for _ in range(3):
            await asyncio.sleep(0.15)
            assert len(tokens_of(await here.generate(ids_request([1, 2], 2)))) == 2
