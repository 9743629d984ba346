"""TLS on the router's public ports: both APIs, client certificates, renewal under traffic."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.base.errors import BatonError, ErrorKind
from baton.client import AsyncClient, Client, Tls
from baton.v1.router_pb2_grpc import RouterServiceStub
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import TargetSettings, TlsSettings
from loadgen.targets.preflight import served_model
from services.common.config.router import ConnectionLimits
from services.common.config.tls import PublicTls
from services.common.rpc import public_tls
from tests.certificates import Authority, Issued, answer_over_tls, client_context, write
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, tokens_of, until

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
SERVER = "chat.example.com"


class Public:
    """The files of a public identity, and its authorities."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority, self.clients = Authority("servers"), Authority("clients")
        self.renew()
        (folder / "clients.crt").write_bytes(self.clients.pem)

    def renew(self) -> Issued:
        issued = self.authority.issue(SERVER, "127.0.0.1")
        write(self.folder, issued, self.authority.pem)
        return issued

    def config(self, client_certificates: bool = False) -> PublicTls:
        return PublicTls(
            cert_file=self.folder / "tls.crt",
            key_file=self.folder / "tls.key",
            client_ca_file=self.folder / "clients.crt" if client_certificates else None,
        )

    def channel(self, site: Site, client: Issued | None = None) -> grpc.aio.Channel:
        pair = (None, None) if client is None else (client.key_pem, client.pem)
        return grpc.aio.secure_channel(
            site.addresses["grpc"],
            grpc.ssl_channel_credentials(self.authority.pem, *pair),
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", SERVER)],
        )

    def context(self, client: Issued | None = None) -> ssl.SSLContext:
        return client_context(self.authority.pem, client, self.folder)


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The router runs on uvloop, which has a TLS of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        uvloop.run(test(**fixtures))

    return run


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Public:
    monkeypatch.setattr(public_tls, "LOOK_EVERY_S", 0.0)
    return Public(tmp_path)


async def http(site: Site, context: ssl.SSLContext, path: str, body: dict[str, Any]) -> dict[str, Any]:
    host, port = site.addresses["http"].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    parsed: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return parsed


@on_uvloop
async def test_both_apis_over_tls_and_not_in_plaintext(site: SiteMaker, public: Public) -> None:
    async with site(public_tls=public.config()) as here, public.channel(here) as channel:
        call = RouterServiceStub(channel).Generate(ids_request([1, 2, 3], max_tokens=4), timeout=10)
        assert len(tokens_of([response async for response in call])) == 4
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        answer = await http(here, public.context(), "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] <= 4
        for kind, request in (("http", GET), ("grpc", PREFACE)):
            assert b"HTTP/1.1 2" not in await asyncio.to_thread(
                answer_over_tls, here.addresses[kind], None, request
            )
        await here.quiet()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@on_uvloop
async def test_versions(site: SiteMaker, public: Public, version: ssl.TLSVersion) -> None:
    async with site(public_tls=public.config()) as here:
        context = public.context()
        context.minimum_version = context.maximum_version = version
        assert b" 200 " in await asyncio.to_thread(answer_over_tls, here.addresses["http"], context, GET)
        context.set_alpn_protocols(["h2"])
        assert await asyncio.to_thread(answer_over_tls, here.addresses["grpc"], context, PREFACE)


@pytest.mark.parametrize("stranger", ["none", "foreign", "expired"])
@on_uvloop
async def test_with_client_authorities_strangers_get_not_a_byte(
    site: SiteMaker, public: Public, stranger: str
) -> None:
    strangers = {
        "none": None,
        "foreign": Authority("clients").issue("client"),
        "expired": public.clients.issue("client", days=-1),
    }
    client = public.clients.issue("client")
    async with site(public_tls=public.config(client_certificates=True)) as here:
        for kind, request in (("http", GET), ("grpc", PREFACE)):
            for issued, served in ((strangers[stranger], False), (client, True)):
                context = public.context(issued)
                context.set_alpn_protocols(["h2" if kind == "grpc" else "http/1.1"])
                answer = await asyncio.to_thread(answer_over_tls, here.addresses[kind], context, request)
                assert bool(answer) is served
        await until(lambda: here.router.connections.count == 0)
        assert here.router.connections.refused["tls handshake"] == 1
        async with public.channel(here, client) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)


@on_uvloop
async def test_renewal_under_traffic_fails_no_request(site: SiteMaker, public: Public) -> None:
    answered = 0

    async def over_http(here: Site, done: asyncio.Event) -> None:
        nonlocal answered
        while not done.is_set():
            await http(
                here, public.context(), "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}
            )
            answered += 1

    async def over_grpc(here: Site, done: asyncio.Event) -> None:
        nonlocal answered
        while not done.is_set():
            async with public.channel(here) as channel:
                call = RouterServiceStub(channel).Generate(ids_request([1, 2], max_tokens=2), timeout=10)
                assert len(tokens_of([response async for response in call])) == 2
            answered += 1

    async with site(public_tls=public.config()) as here, public.channel(here) as before:
        long = RouterServiceStub(before).Generate(ids_request([7], max_tokens=200), timeout=30)
        done = asyncio.Event()
        running = [asyncio.create_task(run(here, done)) for run in (over_http, over_grpc)]
        for _ in range(4):
            issued = public.renew()
            target = answered + 8
            while answered < target:
                await asyncio.sleep(0.005)
                for task in running:
                    if task.done():
                        task.result()
            presented = await asyncio.to_thread(_presented, here.addresses["http"], public.context())
            assert ssl.DER_cert_to_PEM_cert(presented).encode() == issued.pem
        done.set()
        await asyncio.gather(*running)
        assert len(tokens_of([response async for response in long])) == 200
        await here.quiet()


def _presented(address: str, context: ssl.SSLContext) -> bytes:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as secured:
        certificate = secured.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


@on_uvloop
async def test_an_unfinished_handshake_is_counted_and_ends(site: SiteMaker, public: Public) -> None:
    limits = ConnectionLimits(head_timeout_s=0.3)
    async with site(public_tls=public.config(), connections=limits) as here:
        host, port = here.addresses["http"].rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: here.router.connections.count == 1)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        await until(lambda: here.router.connections.count == 0)
        writer.close()


@on_uvloop
async def test_at_the_limit_a_connection_counts_once(site: SiteMaker, public: Public) -> None:
    limits = ConnectionLimits(max_connections=8, max_connections_per_address=8)
    async with site(public_tls=public.config(), connections=limits) as here:
        host, port = here.addresses["http"].rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port), ssl=public.context()) for _ in range(8)]
        await until(lambda: here.router.connections.count == 8)
        assert not here.router.connections.refused
        for _, writer in idle:
            writer.transport.abort()
        await until(lambda: here.router.connections.count == 0)


@on_uvloop
async def test_the_client_and_loadgen_over_tls(site: SiteMaker, public: Public, tmp_path: Path) -> None:
    mine = public.clients.issue("client")
    cert, key, trusted = tmp_path / "me.crt", tmp_path / "me.key", tmp_path / "ca.crt"
    cert.write_bytes(mine.pem)
    key.write_bytes(mine.key_pem)
    files = {"ca_file": str(trusted), "cert_file": str(cert), "key_file": str(key), "server_name": SERVER}
    async with site(public_tls=public.config(client_certificates=True)) as here:
        async with await AsyncClient.connect(here.addresses["grpc"], tls=Tls(**files)) as client:
            assert (await client.complete([1, 2, 3], max_tokens=4)).usage.completion_tokens == 4
        for url in (f"grpcs://{here.addresses['grpc']}", f"https://{here.addresses['http']}"):
            target = TargetSettings(url=url, tls=TlsSettings(**files))
            assert await served_model(target) == MODEL
        with pytest.raises(LoadgenError):
            await served_model(TargetSettings(url=url, tls=TlsSettings(ca_file=str(tmp_path / "none"))))


def test_an_error_names_the_missing_file_of_a_client(tmp_path: Path) -> None:
    for tls in (Tls(ca_file=tmp_path / "ca.crt"), Tls(cert_file=tmp_path / "me.crt")):
        with pytest.raises(BatonError) as refused:
            Client("127.0.0.1:1", tls=tls)
        assert refused.value.kind is ErrorKind.INVALID
