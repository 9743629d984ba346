"""HTTP clients whose host is cut off: neither FIN nor RST says that they are gone."""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from services.router.http.silent_clients import SILENT_S
from tests.hosts.host import Host
from tests.hosts.network import Network

_THERE, _PORT = "10.0.0.9", 7000
# Prints the path of a request whose client is gone.
_SERVER = """
import asyncio
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from services.router.http.server import HttpServer, http_app

async def stream(request):
    async def parts():
        try:
            while True:
                yield b"." * (1 << 16 if request.url.path == "/unread" else 1)
                await asyncio.sleep(0.05)
        finally:
            print(request.url.path, flush=True)
    return StreamingResponse(parts())

async def whole(request):
    while (await request.receive())["type"] != "http.disconnect":
        pass
    print(request.url.path, flush=True)
    return Response()

async def main():
    routes = [Route("/stream", stream), Route("/unread", stream), Route("/whole", whole)]
    server = HttpServer(http_app(routes))
    server.bind("0.0.0.0", 7000)
    await server.start()
    print("serving", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network()
    made.connect("here", ["10.0.0.1/24"], None)
    yield made
    made.close()


def _asked(path: str) -> socket.socket:
    connection = socket.create_connection((_THERE, _PORT), 5)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: there\r\n\r\n".encode())
    return connection


def _lines(output: selectors.BaseSelector, process: subprocess.Popen[str], until: float) -> list[str]:
    assert process.stdout is not None
    found = []
    while (left := until - time.monotonic()) > 0:
        if output.select(left):
            found.append(process.stdout.readline().strip())
    return found


def test_clients_that_are_cut_off_are_noticed_and_those_that_do_not_read_are_not(
    network: Network, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = Host("there", tmp_path_factory.mktemp("hosts"), network)
    host.start(f"{_THERE}/24")
    command = host.command([sys.executable, "-c", _SERVER], {})
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        selectors.DefaultSelector() as output,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == "serving\n"
        output.register(server.stdout, selectors.EVENT_READ)
        unread = _asked("/unread")
        assert _lines(output, server, time.monotonic() + SILENT_S + 4) == []
        unread.close()
        assert _lines(output, server, time.monotonic() + 2) == ["/unread"]
        clients = [_asked("/stream"), _asked("/whole")]
        assert clients[0].recv(1 << 16)
        with network.between("here", ["there"], drop=True):
            found = _lines(output, server, time.monotonic() + SILENT_S + 4)
            assert sorted(found) == ["/stream", "/whole"]
        for client in clients:
            client.close()
        host.power_off()
