"""Data that the public and the admin ports expose: addresses and integrity reports on the admin ports
only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import structlog

from baton.base.cluster_auth import SECRET_VARIABLE, RpcToken, admin_metadata
from baton.base.errors import BatonError
from baton.v1.admin_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    AdminServiceGetAuditRequest,
    AdminServiceGetStatusRequest,
    DrainRequest,
)
from baton.v1.router_pb2 import GetStatusRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import WorkerRole
from services.cli.main import main
from services.common.config.router import RouterSettings
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, until
from tests.router.fake_workers import FakeCluster, FakeWorker
from tests.router.http_client import http
from tests.router.test_process import config, ready, start

_UNARY = ("GetStatus", "AuditCluster", "ListModels", "GetAudit", "Drain", "SwitchPool")


async def test_the_public_port_gives_no_address_and_no_incarnation(site: SiteMaker) -> None:
    """Every unary call a stranger can make there, by name and as raw bytes, whatever the stubs know."""
    async with site(decode=2) as here:
        await here.generate(ids_request([1, 2], 4))
        async with grpc.aio.insecure_channel(here.addresses["grpc"]) as channel:
            answers, refused = {}, set()
            for service in ("RouterService", "AdminService"):
                for method in _UNARY:
                    call = channel.unary_unary(f"/baton.v1.{service}/{method}", bytes, bytes)
                    try:
                        answers[service, method] = await call(b"", timeout=5)
                    except grpc.aio.AioRpcError as error:
                        refused.add(error.code())
        assert refused == {grpc.StatusCode.UNIMPLEMENTED}
        assert set(answers) == {("RouterService", "GetStatus"), ("RouterService", "ListModels")}
        all_answers = b"".join(answers.values())
        for worker in here.cluster.workers.values():
            assert worker.address.encode() not in all_answers
            assert worker.identity.incarnation not in all_answers
            assert worker.identity.name.encode() not in all_answers
        status = (await here.stub.GetStatus(GetStatusRequest(window_s=60), timeout=5)).router
        assert (status.model, status.serving, status.ttft.count) == (MODEL, True, 1)
        assert status.completion_tokens_per_s * status.window_s == pytest.approx(4)


async def test_the_admin_port_gives_everything(site: SiteMaker) -> None:
    async with site(decode=2) as here:
        await here.generate(ids_request([1, 2], 4))
        full = await here.admin.GetStatus(AdminServiceGetStatusRequest(window_s=60), timeout=5)
        public = await here.stub.GetStatus(GetStatusRequest(window_s=60), timeout=5)
        assert full.router.ttft == public.router.ttft
        assert (full.grpc_address, full.http_address) == (here.addresses["grpc"], here.addresses["http"])
        for worker in full.workers:
            fake = here.worker(worker.worker.identity.name)
            assert worker.worker.address == fake.address
            assert worker.worker.identity.incarnation == fake.identity.incarnation
            assert worker.worker.HasField("report")
        assert len(full.workers) == 3


async def test_the_report_of_one_worker(site: SiteMaker) -> None:
    async with site(decode=2) as here:
        every = await here.admin.GetAudit(AdminServiceGetAuditRequest(), timeout=5)
        assert len(every.workers) == 3
        for named in ("decode-1", here.worker("decode-1").address):
            one = await here.admin.GetAudit(AdminServiceGetAuditRequest(worker=named), timeout=5)
            assert [worker.identity.name for worker in one.workers] == ["decode-1"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.admin.GetAudit(AdminServiceGetAuditRequest(worker="decode-2"), timeout=5)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def states(here: Site) -> dict[str, int]:
    status = await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)
    return {worker.worker.identity.name: worker.state for worker in status.workers}


async def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has(site: SiteMaker) -> None:
    async with site(decode=2) as here:
        for name in ("decode-0", "decode-1"):
            here.worker(name).behaviour.step_s = 0.02
        running = asyncio.create_task(here.generate(ids_request([1], 30)))
        await until(lambda: any(worker.decode.reserves for worker in here.cluster.workers.values()))
        busy = next(name for name, worker in here.cluster.workers.items() if worker.decode.reserves)
        answer = await here.admin.Drain(DrainRequest(worker=busy), timeout=5)
        assert answer.running == 1
        assert (await states(here))[busy] == WORKER_STATE_DRAINING
        for _ in range(4):
            await here.generate(ids_request([1], 2))
        assert len(here.worker(busy).decode.reserves) == 1, "new work for a drained worker"
        assert (await running)[-1].usage.completion_tokens == 30
        await here.quiet()
        answer = await here.admin.Drain(DrainRequest(worker=busy, resume=True), timeout=5)
        assert (answer.running, answer.queued_tokens) == (0, 0)
        assert (await states(here))[busy] == WORKER_STATE_READY
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.admin.Drain(DrainRequest(worker="nobody"), timeout=5)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_drained_router_refuses_with_a_reason(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        here.worker("decode-0").behaviour.step_s = 0.02
        running = asyncio.create_task(here.generate(ids_request([1], 20)))
        await until(lambda: here.router.dispatcher.running == 1)
        assert (await here.admin.Drain(DrainRequest(), timeout=5)).running == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.generate(ids_request([1], 2))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the router is draining")
        assert (await client.get("/health")).status_code == 200
        assert (await running)[-1].usage.completion_tokens == 20
        await here.admin.Drain(DrainRequest(resume=True), timeout=5)
        assert (await client.get("/ready")).status_code == 200
        await here.generate(ids_request([1], 2))


async def test_the_command_that_drains(site: SiteMaker, capsys: pytest.CaptureFixture[str]) -> None:
    with structlog.testing.capture_logs():  # they would be among what the command prints
        await drained_by_command(site, capsys)


async def drained_by_command(site: SiteMaker, capsys: pytest.CaptureFixture[str]) -> None:
    async with site() as here:

        async def baton(*arguments: str) -> tuple[int, str]:
            code = await asyncio.to_thread(main, ["drain", *arguments, "--admin", here.addresses["admin"]])
            shown = capsys.readouterr()
            return code, (shown.out + shown.err).removeprefix("baton: ").strip()

        idle = "requests running: 0, prompt tokens queued: 0"
        assert await baton("decode-0") == (0, f"decode-0: draining; {idle}")
        assert (await states(here))["decode-0"] == WORKER_STATE_DRAINING
        assert await baton("decode-0", "--resume") == (0, f"decode-0: accepts new work; {idle}")
        assert await baton("--router") == (0, f"router: draining; {idle}")
        assert here.router.readiness.reason() == "the router is draining"
        assert await baton("--router", "--resume") == (0, f"router: accepts new work; {idle}")
        assert here.router.readiness.ready()
        assert await baton("decode-7") == (2, "error: no worker is called 'decode-7'")


async def test_what_the_admin_http_port_serves(site: SiteMaker) -> None:
    async with (
        site() as here,
        httpx.AsyncClient(base_url=f"http://{here.addresses['admin_http']}", verify=False) as admin,
    ):
        await here.generate(ids_request([1], 3))
        assert "baton_router_requests_total" in (await admin.get("/metrics")).text
        assert (await admin.get("/health")).status_code == 200
        assert (await admin.get("/ready")).json() == {"status": "ready"}
        assert (await admin.get("/v1/models")).status_code == 404


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"host": "127.0.0.1"}, 200),
        ({"host": "127.0.0.1", "public_metrics": False}, 404),
        ({"host": "0.0.0.0", "auth": "none"}, 404),
        ({"host": "0.0.0.0", "auth": "none", "public_metrics": True}, 200),
    ],
)
async def test_public_metrics_are_on_where_the_listener_is_on_loopback(
    site: SiteMaker, settings: dict[str, object], status: int
) -> None:
    async with site(**settings) as here:
        port = here.addresses["http"].rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
            assert (await client.get("/metrics")).status_code == status
        assert here.addresses["admin_http"].startswith("127.0.0.1:")
        assert here.addresses["admin"].startswith("127.0.0.1:")


def test_admin_ports_are_fixed_unless_the_public_port_is_any() -> None:
    assert RouterSettings().admin_ports == (50052, 8001)
    assert RouterSettings(grpc_port=0).admin_ports == (0, 0)
    assert RouterSettings(grpc_port=0, admin_grpc_port=7, admin_http_port=8).admin_ports == (7, 8)
    assert RouterSettings(admin_grpc_port=0).admin_ports == (0, 8001)
    assert RouterSettings(host="::1").serves_public_metrics
    assert not RouterSettings(host="::").serves_public_metrics


async def test_readiness_of_a_router_process_before_with_and_after_its_workers(model_folder: Path) -> None:
    """`/ready` is 503 with a reason before there are workers and in a drain; `/health` is always 200."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        worker_port, http_port = one.getsockname()[1], other.getsockname()[1]
    settings = {"http_port": http_port, "grpc_port": 0, "drain_s": 5}
    process = await start(config(model_folder, [f"127.0.0.1:{worker_port}"], **settings))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", verify=False) as client:

        async def status_of(path: str) -> tuple[int, str]:
            answer = await client.get(path)
            return answer.status_code, answer.json().get("reason", "")

        async def until_status(path: str, wanted: tuple[int, str]) -> None:
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(httpx.ConnectError):
                        if await status_of(path) == wanted:
                            return
                    await asyncio.sleep(0.02)

        await until_status("/ready", (503, "no worker is ready"))
        assert (await status_of("/health"))[0] == 200
        worker = FakeWorker("both-0", WorkerRole.WORKER_ROLE_BOTH, FakeCluster.like(model_folder))
        async with worker.serving(worker_port):
            addresses = await ready(process)
            assert set(addresses) == {"http", "grpc", "admin", "admin_http"}
            assert await status_of("/ready") == (200, "")
            worker.behaviour.step_s = 0.02
            async with grpc.aio.insecure_channel(addresses["grpc"]) as channel:
                stream = aiter(RouterServiceStub(channel).Generate(ids_request([1], 40), timeout=10))
                await anext(stream)
                process.send_signal(signal.SIGTERM)
                await until_status("/ready", (503, "the router is draining"))
                assert (await status_of("/health"))[0] == 200
                async for _ in stream:
                    pass
            assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_an_admin_port_that_others_reach_asks_for_the_clusters_secret(site: SiteMaker) -> None:
    secret = "a secret of sixteen characters"
    async with site(prefill=0, decode=0, admin_host="0.0.0.0", cluster_secret=secret) as here:
        ask = AdminServiceGetStatusRequest()
        for metadata in ((), RpcToken("another secret, as long").metadata, RpcToken(secret).metadata):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await here.admin.GetStatus(ask, timeout=5, metadata=metadata)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        credentials = admin_metadata({SECRET_VARIABLE: secret})
        status = await here.admin.GetStatus(ask, timeout=5, metadata=credentials)
        assert status.grpc_address == here.addresses["grpc"]
        # Metrics are read-only and name no address: scrapers need no secret.
        port = here.addresses["admin_http"].rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
            assert (await client.get("/metrics")).status_code == 200
    with pytest.raises(BatonError, match=r"an admin port on 0\.0\.0\.0 needs a cluster_secret"):
        async with site(prefill=0, decode=0, admin_host="0.0.0.0"):
            pass
