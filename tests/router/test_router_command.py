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

from baton.cluster_auth import secret_name
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
        *(sys.executable, "-m", "baton.cli.main", "router", "--config", str(file)),
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


async def test_finds_workers_in_redis_then_drains(
    redis: EmbeddedServer, model_folder: Path, tmp_path: Path
) -> None:
    """While it drains, /ready is 503 and the running request goes on; then it exits with 0."""
    file = written(tmp_path, model_folder, redis.url)
    async with (
        registered(redis, model_folder) as worker,
        started(file, BATON_ADMIN_HTTP_HOST="127.0.0.2") as process,
    ):
        addresses = await ready(process)
        admin = f"http://{addresses['admin_http']}"
        assert admin.startswith("http://127.0.0.2:")
        worker.behaviour.step_s = 0.02
        async with httpx.AsyncClient() as client, grpc.aio.insecure_channel(addresses["grpc"]) as channel:
            assert (await client.get(f"{admin}/ready")).status_code == 200
            call = RouterServiceStub(channel).Generate(ids_request([1, 2], 40))
            responses = aiter(call)
            ids = list((await anext(responses)).token_ids)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            answer = await client.get(f"{admin}/ready")
            assert (answer.status_code, answer.json()["reason"]) == (503, "the router is draining")
            assert (await client.get(f"{admin}/health")).status_code == 200
            async for response in responses:
                ids += response.token_ids
        assert ids == expected([1, 2], 40)
        _, stderr = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0
        assert SECRET not in stderr.decode()
        assert redis.password not in stderr.decode()


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


async def test_refused_credentials(redis: EmbeddedServer, model_folder: Path, tmp_path: Path) -> None:
    wrong = f"redis://:not-the-password@127.0.0.1:{redis.port}/0"
    async with started(written(tmp_path, model_folder, wrong)) as process:
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert "refused the user name or password" in stderr.decode().splitlines()[-1]
    assert "not-the-password" not in stderr.decode()
