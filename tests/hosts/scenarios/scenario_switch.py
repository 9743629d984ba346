"""The switch between two hosts: it passes, cuts, delays, limits, drops by size and as firewalls do."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.hosts.host import Host
from tests.hosts.network import Network

_HERE, _THERE, _PORT = "10.0.0.1", "10.0.0.9", 7000
# Sends back what it receives, and each message's length before it.
_ECHO = """
import socket, threading
server = socket.create_server(("", 7000), family=socket.AF_INET6, dualstack_ipv6=True)
def serve(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network()
    made.connect("here", [f"{_HERE}/24", "fd77::1/64"], None)
    host = Host("there", tmp_path_factory.mktemp("hosts"), made)
    host.start(f"{_THERE}/24", "fd77::9/64")
    echo = subprocess.Popen(host.command([sys.executable, "-c", _ECHO], {}))
    assert _answers(_THERE, within_s=10.0)
    yield made
    host.power_off()
    echo.wait(10)
    made.close()


def _connected(address: str, within_s: float = 0.5) -> socket.socket:
    return socket.create_connection((address, _PORT), within_s)


def _answers(address: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with _connected(address) as connection:
                return _echoed(connection, b"x", 0.5)
        except OSError:
            time.sleep(0.02)
    return False


def _echoed(connection: socket.socket, data: bytes, within_s: float) -> bool:
    connection.settimeout(within_s)
    connection.sendall(data)
    received = 0
    try:
        while received < len(data):
            received += len(connection.recv(65536))
    except TimeoutError:
        return False
    return True


def test_both_families_pass(network: Network) -> None:
    for address in (_THERE, "fd77::9"):
        with _connected(address, 2.0) as connection:
            assert _echoed(connection, bytes(300_000), 5.0)


@pytest.mark.parametrize(("source", "target"), [("here", "there"), ("there", "here")])
def test_one_way_cuts_are_one_way(network: Network, source: str, target: str) -> None:
    with _connected(_THERE) as connection:
        assert _echoed(connection, b"x", 2.0)
        network.rule(source, target, drop=True)
        before = network.counts()["passed"]
        assert not _echoed(connection, b"x", 0.3)
        # The other way frames still pass: what is sent again, or its answer.
        assert network.counts()["passed"] > before or source == "here"
        network.rule(source, target)
        assert _echoed(connection, b"", 0.0)
        connection.settimeout(5.0)
        assert connection.recv(10) == b"x"


def test_delays_add_up(network: Network) -> None:
    with _connected(_THERE) as connection, network.between("here", ["there"], delay_s=0.15):
        began = time.monotonic()
        assert _echoed(connection, b"x", 2.0)
        assert time.monotonic() - began >= 0.3


def test_a_rate_bounds_what_passes(network: Network) -> None:
    with _connected(_THERE) as connection:
        assert _echoed(connection, b"x", 2.0)
        network.rule("here", "there", bytes_s=200_000)
        began = time.monotonic()
        assert _echoed(connection, bytes(60_000), 5.0)
        assert time.monotonic() - began >= 0.25
        network.rule("here", "there")


def test_large_frames_alone_are_dropped(network: Network) -> None:
    with _connected(_THERE) as connection, network.between("here", ["there"], largest=600):
        assert _echoed(connection, b"x" * 400, 2.0)
        assert not _echoed(connection, bytes(5000), 0.3)


def test_a_firewall_drops_connections_but_not_what_is_open(network: Network) -> None:
    with _connected(_THERE) as connection:
        for allowed, passes in (
            ([], False),
            ([[[], [_PORT]]], True),
            ([[["10.0.0.7"], [_PORT]], [[_HERE], [22]]], False),
            ([[[_HERE], [22, _PORT]]], True),
        ):
            network.allow("there", allowed)  # type: ignore[arg-type]
            assert _answers(_THERE, 0.4) is passes
            assert _echoed(connection, b"x", 2.0)
