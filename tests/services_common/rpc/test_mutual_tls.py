"""A gRPC server with mutual TLS answers peers with a certificate of an admitted role, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.base.errors import BatonError, ErrorKind
from baton.tls.material import Chain
from baton.tls.mutual import MutualTls
from baton.tls.renewal import Renewal
from services.common.config.tls import InternalTls
from services.common.rpc.grpc_server import GrpcServer, channel_options
from services.common.rpc.internal_rpc import internal_channel
from services.common.rpc.mutual_tls import mutual_tls
from tests.certificates import DOMAIN, Authority, Issued, answer_over_tls, client_context, write

SECRET = "a secret of some length"
# An HTTP/2 client's first bytes: the preface and empty SETTINGS.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


@dataclass
class Front:
    """A worker's front, and what it was made of."""

    address: str
    authority: Authority
    config: InternalTls


def at_once(config: InternalTls, role: str) -> MutualTls:
    """TLS that looks at its files at each connection."""
    files = (config.cert_file, config.key_file, config.ca_file)
    return MutualTls(*files, config.domain, role, look_every_s=0.0)  # type: ignore[arg-type]


async def _echo(request: bytes, context: object) -> bytes:
    return request


async def _endless(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    while True:
        await context.write(b"x")
        await asyncio.sleep(0.005)


def _server(tls: MutualTls, secret: str = "") -> GrpcServer:
    renewal = Renewal(tls.files, hold_s=0.0)
    server = GrpcServer(
        ["test.Test"], secret, tls=tls.server("router", "supervisor", material=renewal.material)
    )
    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo),
        "Endless": grpc.unary_stream_rpc_method_handler(_endless),
    }
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))
    return server


@contextlib.asynccontextmanager
async def _front(folder: Path, secret: str = "") -> AsyncIterator[Front]:
    authority = Authority()
    config = authority.internal(folder, "prefill")
    server = _server(at_once(config, "prefill"), secret)
    try:
        yield Front(await server.start("127.0.0.1", 0), authority, config)
    finally:
        await server.stop(0)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with _front(tmp_path) as made:
        yield made


def caller(front: Front, folder: Path, role: str = "router") -> grpc.aio.Channel:
    """A channel of another process of the cluster."""
    tls = at_once(front.authority.internal(folder, role), role)
    return internal_channel(
        front.address, channel_options(), "", tls.peer("prefill", chains=published(front, tls))
    )


def published(front: Front, tls: MutualTls) -> tuple[Chain, ...]:
    return tls.trusted([front.config.cert_file.read_text()], "prefill")


async def echo(channel: grpc.aio.Channel) -> bytes:
    answer: bytes = await channel.unary_unary("/test.Test/Echo", None, None)(b"hello", timeout=5)
    return answer


@pytest.mark.parametrize("role", ["router", "supervisor"])
async def test_admitted_roles_are_served(front: Front, tmp_path: Path, role: str) -> None:
    async with caller(front, tmp_path, role) as channel:
        assert await echo(channel) == b"hello"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_other_roles_get_no_answer_to_any_method(front: Front, tmp_path: Path, role: str) -> None:
    async with caller(front, tmp_path, role) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await echo(channel)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_stream("/test.Test/Endless", None, None)(b"", timeout=5).read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_clusters_token_is_needed_beside_the_certificate(tmp_path: Path) -> None:
    async with _front(tmp_path, SECRET) as front, caller(front, tmp_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await echo(channel)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


STRANGERS: dict[str, Callable[[Authority], Issued | None]] = {
    "none": lambda authority: None,
    "foreign": lambda authority: Authority("authority").of_role("router"),
    "expired": lambda authority: authority.of_role("router", days=-1),
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_strangers_get_not_a_byte(front: Front, tmp_path: Path, stranger: str) -> None:
    def ask(issued: Issued | None) -> bytes:
        context = client_context(front.authority.pem, issued, tmp_path)
        context.set_alpn_protocols(["h2"])
        return answer_over_tls(front.address, context, PREFACE)

    assert await asyncio.to_thread(ask, STRANGERS[stranger](front.authority)) == b""
    assert await asyncio.to_thread(ask, front.authority.of_role("router")) != b""
    assert not await asyncio.to_thread(answer_over_tls, front.address, None, PREFACE)


async def test_a_server_of_another_role_or_with_another_certificate_is_not_called(
    front: Front, tmp_path: Path
) -> None:
    tls = at_once(front.authority.internal(tmp_path, "router"), "router")
    another = tls.trusted([front.authority.of_role("prefill").pem.decode()], "prefill")
    assert len(another) == 1
    for peer in (tls.peer("decode"), tls.peer("prefill", chains=another)):
        async with internal_channel(front.address, channel_options(), "", peer) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await echo(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_only_certificates_of_the_role_that_lead_to_an_authority_are_trusted(tmp_path: Path) -> None:
    authority, foreign = Authority(), Authority()
    intermediate = Authority("intermediate", issuer=authority)
    tls = mutual_tls(authority.internal(tmp_path, "router"), "router")
    chain = intermediate.of_role("workers").pem + intermediate.pem
    right = [authority.of_role("decode"), authority.of_role("workers")]
    wrong = [authority.of_role("prefill"), authority.of_role("decode", days=-1), foreign.of_role("decode")]
    assert len(tls.trusted([one.pem.decode() for one in right], "decode")) == 2
    assert len(tls.trusted([chain.decode()], "decode")) == 1
    assert tls.trusted([one.pem.decode() for one in wrong], "decode") == ()
    assert tls.trusted(["", "no certificate", intermediate.of_role("decode").pem.decode()], "decode") == ()
    # A leaf is no authority, whatever it signs.
    leaf = Authority()
    leaf.issued = authority.of_role("decode")
    forged = leaf.of_role("decode").pem + leaf.issued.pem
    assert tls.trusted([forged.decode()], "decode") == ()
    with pytest.raises(BatonError) as refused:
        tls.published_peer([wrong[0].pem.decode()], "decode")
    assert refused.value.kind is ErrorKind.UNAUTHENTICATED


async def test_renewals_of_both_ends_fail_no_request(front: Front, tmp_path: Path) -> None:
    """Both ends' certificates and their authority change while calls and a stream run."""
    own = front.authority.internal(tmp_path, "router")
    tls = at_once(own, "router")
    calls = 0

    async def call(channel: grpc.aio.Channel, until: asyncio.Event) -> None:
        nonlocal calls
        while not until.is_set():
            assert await echo(channel) == b"hello"
            calls += 1

    channel = internal_channel(front.address, channel_options(), "", tls.peer("prefill", chains=()))
    # Without published certificates the name workers.DOMAIN is expected.
    front_folder = front.config.cert_file.parent
    write(front_folder, front.authority.of_role("workers"), front.authority.pem)
    async with channel:
        stream = channel.unary_stream("/test.Test/Endless", None, None)(b"")
        assert await stream.read() == b"x"
        done = asyncio.Event()
        running = [asyncio.create_task(call(channel, done)) for _ in range(4)]
        successor = Authority("successor")
        both = front.authority.pem + successor.pem
        for folder, issued, trusted in (
            (front_folder, front.authority.of_role("workers"), both),
            (own.cert_file.parent, front.authority.of_role("router"), both),
            (front_folder, successor.of_role("workers"), both),
            (own.cert_file.parent, successor.of_role("router"), both),
            (front_folder, successor.of_role("workers"), successor.pem),
            (own.cert_file.parent, successor.of_role("router"), successor.pem),
        ):
            write(folder, issued, trusted)
            before = calls
            while calls < before + 20:
                await asyncio.sleep(0.005)
                for task in running:
                    if task.done():
                        task.result()
        done.set()
        await asyncio.gather(*running)
        assert await stream.read() == b"x"  # over its first connection
        stream.cancel()
    # The first authority is not trusted any more.
    former = client_context(successor.pem, front.authority.of_role("router"), tmp_path)
    former.set_alpn_protocols(["h2"])
    assert not await asyncio.to_thread(answer_over_tls, front.address, former, PREFACE)


@pytest.mark.parametrize("fault", ["no key", "another key", "no certificate", "role", "authority", "expired"])
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    authority = Authority()
    config = authority.internal(tmp_path, "router", days=-1 if fault == "expired" else 1)
    if fault == "no key":
        os.remove(config.key_file)
    elif fault == "another key":
        config.key_file.write_bytes(authority.of_role("router").key_pem)
    elif fault == "no certificate":
        config.cert_file.write_text("nothing")
    elif fault == "authority":
        config.ca_file.write_bytes(Authority().pem)
    with pytest.raises(BatonError) as refused:
        mutual_tls(config, "decode" if fault == "role" else "router")
    assert refused.value.kind is ErrorKind.INVALID
    assert "\n" not in refused.value.message
    assert str(tmp_path) in refused.value.message


def test_names_of_roles(tmp_path: Path) -> None:
    tls = mutual_tls(Authority().internal(tmp_path, "workers"), "decode")
    assert tls.names("prefill") == (f"prefill.{DOMAIN}", f"workers.{DOMAIN}")
    assert tls.names("both") == (f"workers.{DOMAIN}",)
    assert tls.names("router", "supervisor") == (f"router.{DOMAIN}", f"supervisor.{DOMAIN}")
