"""Addresses as text, in both families."""

from __future__ import annotations

import socket

import pytest

from baton.base.addresses import is_loopback, join_address, listening_host, split_address
from services.common.rpc.grpc_server import bind_socket


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[fe80::1]", "[fe80::1]:5"), ("name", "name:5")],
)
def test_addresses_round_trip(host: str, address: str) -> None:
    assert join_address(host, 5) == address
    assert split_address(address) == (host.strip("[]"), 5)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_all_addresses_are_those_of_the_families_that_there_are() -> None:
    assert listening_host("::", has_ipv6=True) == listening_host("[::]", has_ipv6=True) == "::"
    assert listening_host("::", has_ipv6=False) == listening_host("[::]", has_ipv6=False) == "0.0.0.0"
    for host in ("0.0.0.0", "::1", "10.0.0.1", "name"):
        assert listening_host(host, has_ipv6=False) == listening_host(host, has_ipv6=True) == host


def test_a_port_on_all_addresses_takes_callers_of_both_families() -> None:
    with bind_socket("::", 0) as bound:
        bound.listen()
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, bound.getsockname()[1]), timeout=5).close()
