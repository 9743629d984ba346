"""Addresses as text, in both families."""

from __future__ import annotations

import pytest

from baton.addresses import is_loopback, join_address, split_address


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
