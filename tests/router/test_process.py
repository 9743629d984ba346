"""`python -m services.router` as its parent sees it: one line on stdout, exit codes, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from baton.base.process_stat import is_running
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import WorkerRole
from tests.router.conftest import MODEL, ids_request, until
from tests.router.fake_model import expected
from tests.router.fake_workers import FakeCluster, FakeWorker

Process = asyncio.subprocess.Process


def config(folder: Path, workers: list[str], **settings: Any) -> bytes:
    document = {
        "model": str(folder),
        "served_model_name": MODEL,
        "workers": workers,
        "http_port": 0,
        "grpc_port": 0,
    }
    return json.dumps({**document, **settings}).encode()


async def start(stdin: bytes, *command: str) -> Process:
    process = await asyncio.create_subprocess_exec(
        *(command or (sys.executable, "-m", "services.router")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    return process


async def ready(process: Process, timeout_s: float = 20) -> dict[str, str]:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
    addresses: dict[str, str] = json.loads(line)["ready"]
    return addresses


async def refusal(stdin: bytes) -> str:
    """Starts a router that must refuse; its one clear line."""
    process = await start(stdin)
    stdout, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    lines = stdout.decode().splitlines()
    assert len(lines) == 1
    error = json.loads(lines[0])["error"]
    assert error["kind"] == "invalid"
    message: str = error["message"]
    return message


@contextlib.asynccontextmanager
async def fake_pair(model_folder: Path) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker("both-0", WorkerRole.WORKER_ROLE_BOTH, FakeCluster.like(model_folder))
    async with worker.serving():
        yield worker


async def test_serves_then_drains(model_folder: Path) -> None:
    """SIGTERM lets the running request end, refuses new ones, and exits 0 without further output."""
    async with fake_pair(model_folder) as worker:
        process = await start(config(model_folder, [worker.address]))
        addresses = await ready(process)
        async with httpx.AsyncClient(base_url=f"http://{addresses['http']}", verify=False) as client:
            assert (await client.get("/health")).status_code == 200
        worker.behaviour.step_s = 0.02
        async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
            call = RouterServiceStub(channel).Generate(ids_request([1, 2], 20))
            responses = aiter(call)
            ids = list((await anext(responses)).token_ids)
            process.send_signal(signal.SIGTERM)
            async for response in responses:
                ids += response.token_ids
        assert ids == expected([1, 2], 20)
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert process.stdout is not None
        assert await process.stdout.read() == b""


async def test_a_stopping_router_moves_its_clients_elsewhere(model_folder: Path) -> None:
    """A connection that a client has kept is answered once more, with the word that it ends, while a new call
    over gRPC finds no router; one without a request ends after a second."""
    async with fake_pair(model_folder) as worker, contextlib.AsyncExitStack() as stack:
        process = await start(config(model_folder, [worker.address]))
        addresses = await ready(process)
        host, port = addresses["http"].split(":")
        kept = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{addresses['http']}", verify=False)
        )
        silent, writer = await asyncio.open_connection(host, int(port))
        asked = {"model": MODEL, "prompt": [1, 2], "max_tokens": 3}
        assert "connection" not in (await kept.post("/v1/completions", json=asked)).headers
        worker.behaviour.step_s = 0.05
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(addresses["grpc"]))
        running = aiter(RouterServiceStub(channel).Generate(ids_request([1, 2], 40)))
        await anext(running)
        process.send_signal(signal.SIGTERM)
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        answer = await kept.post("/v1/completions", json=asked)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert await asyncio.wait_for(silent.read(), 10) == b""
        async with httpx.AsyncClient(base_url=f"http://{addresses['http']}", verify=False) as late:
            refused = await late.post("/v1/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            503,
            "the router is shutting down",
        )
        assert process.returncode is None, "a request still runs"
        assert len([response async for response in running]) > 1
        writer.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_second_signal_stops_at_once(model_folder: Path) -> None:
    async with fake_pair(model_folder) as worker:
        process = await start(config(model_folder, [worker.address]))
        addresses = await ready(process)
        worker.behaviour.step_s = 0.5
        async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
            responses = aiter(RouterServiceStub(channel).Generate(ids_request([1, 2], 200)))
            await anext(responses)
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            assert process.returncode is None
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 5) == 130
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(responses)


async def test_not_ready_before_its_workers(model_folder: Path) -> None:
    worker = FakeWorker("both-0", WorkerRole.WORKER_ROLE_BOTH, FakeCluster.like(model_folder))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    process = await start(config(model_folder, [f"127.0.0.1:{port}"]))
    waiting = asyncio.create_task(ready(process))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    async with worker.serving(port):
        await waiting
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_refusals(model_folder: Path, tmp_path: Path) -> None:
    assert "config.json" in await refusal(config(tmp_path, []))
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    assert "tokenizer.json" in await refusal(config(tmp_path, []))
    assert "unknown_key" in await refusal(config(model_folder, [], unknown_key=1))
    assert "JSON" in await refusal(b"{")


@pytest.mark.parametrize(
    "setting",
    [
        "http_port",
        pytest.param("admin_grpc_port", marks=pytest.mark.slow),
        pytest.param("grpc_port", marks=pytest.mark.slow),
        pytest.param("admin_http_port", marks=pytest.mark.slow),
    ],
)
async def test_a_port_that_is_taken(model_folder: Path, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = {"admin_grpc_port": 0, "admin_http_port": 0}
        message = await refusal(config(model_folder, [], **{**free, setting: port}))
        assert message == f"cannot listen on 127.0.0.1:{port}: address already in use"


_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "services.router"], stdin=subprocess.PIPE)
child.stdin.write(sys.stdin.buffer.read())
child.stdin.close()
print(child.pid, file=sys.stderr, flush=True)
child.wait()
"""


async def test_dies_with_its_parent(model_folder: Path) -> None:
    async with fake_pair(model_folder) as worker:
        parent = await start(config(model_folder, [worker.address]), sys.executable, "-c", _PARENT)
        assert parent.stderr is not None
        child = int(await asyncio.wait_for(parent.stderr.readline(), 10))
        await ready(parent)
        parent.kill()
        await parent.wait()
        await until(lambda: not is_running(child))
