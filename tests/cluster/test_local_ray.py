"""The ports that a Ray of our own is told to use."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from baton.cluster import local_ray
from baton.cluster.local_ray import free_ports


def test_ports_are_free_and_nobody_is_given_them() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with ExitStack() as stack:
        given = [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(50)]
        assert max(ports) < min(given)
        for port in ports:
            stack.enter_context(socket.create_server(("", port)))


@pytest.mark.parametrize("first_given", [1024, 10_003])
def test_where_the_kernel_gives_almost_all_of_them(monkeypatch: pytest.MonkeyPatch, first_given: int) -> None:
    monkeypatch.setattr(local_ray, "_first_given", lambda: first_given)
    assert len(set(free_ports(5))) == 5


def test_one_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(local_ray, "_PORTS_TRIED", 1)
    monkeypatch.setattr(local_ray, "_LOWEST_PORT", port)
    monkeypatch.setattr(local_ray, "_first_given", lambda: port + 1)
    assert free_ports(1) == [port]
    with socket.create_server(("", port)), pytest.raises(OSError, match="free"):
        free_ports(1)
