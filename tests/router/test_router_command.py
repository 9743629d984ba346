"""`baton router --config FILE` as a process: it finds workers in Redis, serves, drains, and says why not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest_asyncio
import yaml

from baton.base.cluster_auth import secret_name
from baton.state import Member, State
from baton.state.embedded import EmbeddedServer
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import WorkerRole
from tests.router.conftest import MODEL, ids_request
from tests.router.fake_model import expected
from tests.router.fake_workers import FakeCluster, FakeWorker
from tests.router.test_process import Process, ready

SECRET = "the secret of a cluster"


@pytest_asyncio.fixture
async def redis() -> AsyncIterator[EmbeddedServer]:
    server = await EmbeddedServer.start()
    yield server
    await server.stop()


@contextlib.asynccontextmanager
async def registered(server: EmbeddedServer, model_folder: Path) -> AsyncIterator[FakeWorker]:
    """A fake worker with an entry in the registry."""
    worker = FakeWorker("both-0", WorkerRole.WORKER_ROLE_BOTH, FakeCluster.like(model_folder))
    async with worker.serving():
        state = State.at(server.url, namespace="ours")
        member = Member(
            name="both-0",
            incarnation=worker.identity.incarnation.hex(),
            role="both",
            model=MODEL,
            host=socket.gethostname(),
            addresses={"grpc": worker.address},
            secret_name=secret_name(SECRET),
        )
        state.lease(member)
        try:
            yield worker
        finally:
            await state.close()


def written(folder: Path, model: Path, url: str, **settings: Any) -> Path:
    """A configuration file, and the files of secrets that it names."""
    (folder / "cluster-secret").write_text(SECRET + "\n")
    (folder / "redis-url").write_text(url + "\n")
    document = {
        "model": str(model),
        "served_model_name": MODEL,
        "cluster_secret_file": str(folder / "cluster-secret"),
        "state": {"namespace": "ours", "redis_url_file": str(folder / "redis-url")},
        "router": {"http_port": 0, "grpc_port": 0},
        **settings,
    }
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.asynccontextmanager
async def started(file: Path, **environment: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.main", "router", "--config", str(file)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_two_routers_find_workers_in_redis_and_one_drains(
    redis: EmbeddedServer, model_folder: Path, tmp_path: Path
) -> None:
    """The routers share the journal key. While one drains, its /ready is 503 and its request goes on; then it
    exits with 0. The other one serves on."""
    (tmp_path / "journal-key").write_text("0f" * 32)
    state = {
        "namespace": "ours",
        "redis_url_file": str(tmp_path / "redis-url"),
        "journal_key_file": str(tmp_path / "journal-key"),
    }
    file = written(tmp_path, model_folder, redis.url, state=state)
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(registered(redis, model_folder))
        admin_host = "127.0.0.2"
        first = await stack.enter_async_context(started(file, BATON_ADMIN_HTTP_HOST=admin_host))
        second = await stack.enter_async_context(started(file))
        addresses = [await ready(process) for process in (first, second)]
        admin = f"http://{addresses[0]['admin_http']}"
        assert admin.startswith(f"http://{admin_host}:")
        client = await stack.enter_async_context(httpx.AsyncClient(verify=False))
        assert (await client.get(f"{admin}/ready")).status_code == 200
        worker.behaviour.step_s = 0.02
        calls = []
        for address in addresses:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address["grpc"]))
            calls.append(aiter(RouterServiceStub(channel).Generate(ids_request([1, 2], 40))))
        outputs = [list((await anext(call)).token_ids) for call in calls]
        first.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        answer = await client.get(f"{admin}/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the router is draining")
        assert (await client.get(f"{admin}/health")).status_code == 200
        for output, call in zip(outputs, calls, strict=True):
            async for response in call:
                output += response.token_ids
        assert outputs == [expected([1, 2], 40)] * 2
        _, stderr = await asyncio.wait_for(first.communicate(), 10)
        assert (first.returncode, second.returncode) == (0, None)
        assert SECRET not in stderr.decode()
        assert redis.password not in stderr.decode()


async def test_the_ports_on_all_addresses_answer_over_both_families(
    redis: EmbeddedServer, model_folder: Path, tmp_path: Path
) -> None:
    """The ports are those of a pod, whose cluster has IPv4, IPv6 or both: public HTTP and gRPC, and the admin
    HTTP port."""
    ports = {"host": "::", "admin_http_host": "::", "http_port": 0, "grpc_port": 0, "processes": 2}
    file = written(tmp_path, model_folder, redis.url, router=ports, auth="none")
    async with registered(redis, model_folder), started(file) as router:
        addresses = await ready(router)
        async with httpx.AsyncClient() as client:
            for host in ("127.0.0.1", "[::1]"):
                ports = {name: address.rpartition(":")[2] for name, address in addresses.items()}
                assert (await client.get(f"http://{host}:{ports['http']}/v1/models")).status_code == 200
                assert (await client.get(f"http://{host}:{ports['admin_http']}/ready")).status_code == 200
                async with grpc.aio.insecure_channel(f"{host}:{ports['grpc']}") as channel:
                    outputs = RouterServiceStub(channel).Generate(ids_request([1, 2], 4))
                    tokens = [token async for output in outputs for token in output.token_ids]
                assert tokens == expected([1, 2], 4)


async def test_a_refusal_is_one_line_and_exit_code_2(model_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = written(
            tmp_path, model_folder, "redis://127.0.0.1:1/0", router={"http_port": port, "grpc_port": 0}
        )
        async with started(file) as process:
            _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert stderr.decode() == f"baton: error: cannot listen on 127.0.0.1:{port}: address already in use\n"
