"""Strangers on workers' ports: a caller without the cluster's secret gets no answer and does no harm."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import decode_pb2, prefill_pb2, transfer_pb2, worker_pb2
from baton.v1.types_pb2 import Attempt, WorkerIdentity
from baton.v1.worker_pb2 import DescribeRequest, DescribeResponse
from baton.v1.worker_pb2_grpc import WorkerServiceStub
from kvtransfer.protocol.handshake import link_request
from kvtransfer.protocol.link_auth import LinkAuth
from tests.e2e.support.cluster import Cluster, assert_all_free, worker_channel
from tests.e2e.support.workers import Loose, Worker, loose_workers

ENGINE = {"device": "cpu", "dtype": "float64", "prefix_cache": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
REQUESTS = 60
# Methods that are in no proto.
OTHERS = ("/baton.v1.TransferService/Frames", "/grpc.health.v1.Health/Watch")
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return int(server.getsockname()[1])


async def described(worker: Worker) -> DescribeResponse:
    async with worker_channel(worker.address) as channel:
        return await WorkerServiceStub(channel).Describe(DescribeRequest(), timeout=5)


async def code_of(channel: grpc.aio.Channel, method: str, message: bytes = b"") -> grpc.StatusCode:
    """Returns the status of a call that sends one message, whatever the method's shape."""
    call = channel.unary_stream(method, None, None)(message, timeout=5)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


async def ask(cluster: Cluster, requests: int) -> list[int]:
    """Sends `requests` requests from four clients and returns the attempts that each took. A failure
    raises."""
    turn = asyncio.Semaphore(4)
    async with cluster.stub() as stub:

        async def one(number: int) -> int:
            async with turn:
                answer = await cluster.generate(stub, [1 + number % 50] * 40, **GREEDY)
            assert answer.last is not None
            return answer.last.trace.attempts

        attempts = await asyncio.gather(*(one(number) for number in range(requests)))
    await assert_all_free(cluster, 5.0)
    return list(attempts)


@contextlib.asynccontextmanager
async def under_attack(loose: Loose, transfer: str) -> AsyncIterator[set[grpc.StatusCode]]:
    """An attacker opens links in prefill's name, releases tickets and cancels, some hundred times a second;
    yields the codes that the calls got."""
    seen: set[grpc.StatusCode] = set()
    decode, prefill = loose.workers["decode-0"], loose.workers["prefill-0"]
    receiver = (await described(decode)).identity.incarnation
    named = WorkerIdentity(name="prefill-0", incarnation=b"s" * 16, rank=0, rank_count=1, started_ns=2**63)
    request = link_request(named, receiver, (await described(decode)).fingerprint, 1 << 40)
    attempt = Attempt(request_id=b"r" * 16, number=1)
    ticket = prefill_pb2.ProvideTicketRequest(
        attempt=attempt, ticket=decode_pb2.Ticket(body=bytes(1_000_000))
    )
    reserve = decode_pb2.ReserveRequest(
        attempt=attempt, router_id=b"o" * 16, token_count=4, max_tokens=4, ttl_ms=60_000
    )
    calls = (
        (transfer, "TransferService/OpenLink", request),
        (transfer, "TransferService/SignedOpenLink", LinkAuth("another secret").hello(request, b"challenge")),
        (prefill.address, "PrefillService/ProvideTicket", ticket),
        (decode.address, "DecodeService/Reserve", reserve),
    )

    async def attack() -> None:
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(where)) for where, _, _ in calls
            ]
            while True:
                for channel, (_, method, message) in zip(channels, calls, strict=True):
                    seen.add(await code_of(channel, f"/baton.v1.{method}", message.SerializeToString()))
                await asyncio.sleep(0.005)

    attacking = asyncio.create_task(attack())
    yield seen
    attacking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attacking


@pytest.mark.slow
async def test_strangers_get_nothing_and_do_no_harm(model: Path) -> None:
    transfer = f"127.0.0.1:{(port := free_port())}"
    links = {"transport": "grpc", "transfer_port": port}
    with loose_workers(model, "prefill", "decode", engine=ENGINE, transfer=links) as loose:
        async with under_attack(loose, transfer) as seen:
            attempts = await ask(loose.cluster, REQUESTS)
        assert seen == {grpc.StatusCode.UNAUTHENTICATED}
        assert set(attempts) == {1}
        report = await loose.workers["decode-0"].report()
        assert (len(report.links), report.live_tickets) == (1, 0)
        ports = {
            transfer: [transfer_pb2],
            loose.workers["prefill-0"].address: [prefill_pb2, worker_pb2],
            loose.workers["decode-0"].address: [decode_pb2, worker_pb2],
        }
        for address, modules in ports.items():
            async with grpc.aio.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                for method in (*OTHERS, REFLECTION, *(m for module in modules for m in methods(module))):
                    assert await code_of(channel, method) is grpc.StatusCode.UNAUTHENTICATED, method


def methods(module: Any) -> list[str]:
    services = module.DESCRIPTOR.services_by_name.values()
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc", "auto"])
async def test_a_cluster_on_ipv6(model: Path, transport: str) -> None:
    port = free_port("::1")
    sections: dict[str, Any] = {
        "host": "::1",
        "transfer": {"transport": transport, "transfer_port": port},
        "router": {"host": "::1", "admin_host": "::1"},
    }
    with loose_workers(model, "prefill", "decode", engine=ENGINE, **sections) as loose:
        assert all(worker.address.startswith("[::1]:") for worker in loose.workers.values())
        assert set(await ask(loose.cluster, 4)) == {1}
        async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        async with loose.cluster.http() as http:
            assert (await http.get("/health")).status_code == 200
