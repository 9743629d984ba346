"""Several router processes on one port, as their parent and their clients see them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import httpx
import pytest

from baton.base.errors import BatonError
from baton.v1.admin_pb2 import AdminServiceGetStatusRequest, DrainRequest
from baton.v1.admin_pb2_grpc import AdminServiceStub
from baton.v1.router_pb2 import GetStatusRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from services.common.config.router import RouterConfig
from services.common.processes.process_tree import descendants
from services.router.processes.ports import reserved_ports
from tests.router.conftest import MODEL, ids_request, until
from tests.router.fake_model import expected
from tests.router.test_process import config, fake_pair, ready, start
from tests.support.command_lines import command_line

if TYPE_CHECKING:
    from baton.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

# Three processes start, on a machine that may have others' work.
START_S = 60
_SERIES = re.compile(r'^baton_router_output_tokens_total\{.*process="(\d)".*\} (\S+)$', re.MULTILINE)


def routers(parent: int) -> list[int]:
    """The processes that serve, in order of their start."""
    found = sorted(descendants(parent))
    return [pid for pid in found if "services.router" in command_line(pid)]


async def _tokens(admin: str) -> Counter[str]:
    """Output tokens of each router process."""
    async with httpx.AsyncClient(verify=False) as client:
        text = (await client.get(f"http://{admin}/metrics")).text
    return Counter({index: int(float(value)) for index, value in _SERIES.findall(text)})


async def _generate(stack: contextlib.AsyncExitStack, address: str) -> RouterServiceAsyncStub:
    """A client with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
    return RouterServiceStub(channel)


async def test_two_processes_serve_one_port(model_folder: Path) -> None:
    """Connections are spread; figures and drains are those of both; one that is killed takes only its own
    streams along and is replaced; both stop together."""
    async with fake_pair(model_folder) as worker, contextlib.AsyncExitStack() as stack:
        worker.decode.slots = 32
        process = await start(config(model_folder, [worker.address], processes=2))
        addresses = await ready(process, START_S)
        killed, kept = routers(process.pid)  # the first one decides for both in which way work is divided
        stubs = [await _generate(stack, addresses["grpc"]) for _ in range(12)]
        answers = await asyncio.gather(*(_ids(stub, 4) for stub in stubs))
        assert answers == [expected([1, 2], 4)] * 12
        tokens = await _tokens(addresses["admin_http"])
        assert tokens.total() == 48
        assert len([count for count in tokens.values() if count]) == 2
        status = (await stubs[0].GetStatus(GetStatusRequest())).router
        assert status.ttft.count == 12
        async with httpx.AsyncClient(base_url=f"http://{addresses['http']}", verify=False) as client:
            body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 3}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

        admin: AdminServiceAsyncStub = AdminServiceStub(
            await stack.enter_async_context(grpc.aio.insecure_channel(addresses["admin"]))
        )
        await admin.Drain(DrainRequest())
        await asyncio.gather(*(_answers(stub, grpc.StatusCode.UNAVAILABLE) for stub in stubs))
        await admin.Drain(DrainRequest(resume=True))
        await asyncio.gather(*(_answers(stub, grpc.StatusCode.OK) for stub in stubs))

        worker.behaviour.step_s = 0.05
        running = [aiter(stub.Generate(ids_request([1, 2], 40))) for stub in stubs]
        for one in running:
            await anext(one)
        full = await admin.GetStatus(AdminServiceGetStatusRequest())
        assert full.router.running == 12
        os.kill(killed, signal.SIGKILL)
        # The admin ports do not go with it, nor do drains that come later.
        async with asyncio.timeout(START_S):
            while await status_of(addresses["admin_http"], "/metrics") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        ends = await asyncio.gather(*(_end(one) for one in running))
        assert set(ends) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        await admin.Drain(DrainRequest(), wait_for_ready=True, timeout=START_S)
        await until(lambda: len(routers(process.pid)) == 2 and killed not in routers(process.pid), START_S)
        await asyncio.gather(*(_answers(stub, grpc.StatusCode.UNAVAILABLE) for stub in stubs))
        worker.behaviour.step_s = 0.001
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START_S) == 0
        assert not os.path.exists(f"/proc/{kept}")  # noqa: ASYNC240 (no disk)


async def status_of(address: str, path: str) -> int:
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(timeout=2, verify=False) as client:
            return (await client.get(f"http://{address}{path}")).status_code
    return 0


async def _ids(stub: RouterServiceAsyncStub, count: int) -> list[int]:
    return [token async for one in stub.Generate(ids_request([1, 2], count)) for token in one.token_ids]


async def _end(responses: object) -> grpc.StatusCode:
    try:
        async for _ in responses:  # type: ignore[attr-defined]
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _answers(stub: RouterServiceAsyncStub, code: grpc.StatusCode) -> None:
    """Returns once a call ends like this: a process has then received what operators changed."""
    request = ids_request([1, 2], 2)
    async with asyncio.timeout(START_S):
        while await _end(stub.Generate(request, timeout=0.5)) is not code:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_ports_are_reserved_and_must_be_free() -> None:
    """A process that already listens with SO_REUSEPORT would share our connections without an error."""
    settings = RouterConfig(model="m", served_model_name="m", http_port=0, grpc_port=0, processes=2)
    with reserved_ports(settings) as bound:
        ports = (bound.http_port, bound.grpc_port, bound.admin_grpc_port, bound.admin_http_port)
        assert all(ports)
        assert len(set(ports)) == 4
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = f"cannot listen on 127.0.0.1:{port}: address already in use"
        with (
            pytest.raises(BatonError, match=message),
            reserved_ports(settings.model_copy(update={"grpc_port": port})),
        ):
            pass
