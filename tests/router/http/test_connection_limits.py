"""Connections that are closed for new ones, and their number in a process."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field

import pytest

from baton.base.errors import BatonError
from services.common.config.router import ConnectionLimits
from services.router.http.connections import RESERVE, Connections, client_address
from services.router.http.descriptors import raise_descriptor_limit, within_descriptors


@dataclass(eq=False)
class Fake:
    address: str
    buffered: int = 0
    evicted: list[str] = field(default_factory=list)

    def evict(self, message: str) -> None:
        self.evicted.append(message)


def limited(most: int = 4, share: int | None = None, **limits: int) -> Connections:
    configured = ConnectionLimits(max_connections_per_address=share, **limits)
    return Connections(configured.model_copy(update={"max_connections": most}))


def admitted(connections: Connections, *addresses: str, now: float = 0) -> list[Fake]:
    fakes = [Fake(address) for address in addresses]
    for one in fakes:
        assert connections.admit(one, now)
    return fakes


def test_the_longest_idle_connection_of_the_largest_address_is_closed() -> None:
    connections = limited(share=3)
    mine, first, second, third = admitted(connections, "a", "b", "b", "b")
    assert connections.admit(Fake("c"), 1.0)
    assert [bool(one.evicted) for one in (mine, first, second, third)] == [False, True, False, False]
    assert connections.count == 4


def test_an_address_at_its_share_displaces_its_own_connections() -> None:
    connections = limited(most=10, share=2)
    mine, first, second = admitted(connections, "a", "b", "b")
    connections.set_running(first, running=True, now=1)
    assert connections.admit(Fake("b"), 2.0)
    assert (mine.evicted, first.evicted, len(second.evicted)) == ([], [], 1)


def test_half_of_all_is_an_addresss_share() -> None:
    connections = limited(most=4)
    admitted(connections, "a", "a")
    assert not connections.admit(Fake("a"), 0.5)
    admitted(connections, "b", now=0.5)


def test_a_recently_active_connection_is_not_closed() -> None:
    connections = limited(most=1, share=1)
    (one,) = admitted(connections, "a")
    assert not connections.admit(Fake("b"), 0.9)
    connections.set_running(one, running=True, now=1)
    assert not connections.admit(Fake("b"), 100)
    connections.set_running(one, running=False, now=101)
    assert not connections.admit(Fake("b"), 101.9)
    assert not one.evicted
    assert connections.admit(Fake("b"), 102)
    assert one.evicted


def test_running_requests_are_not_closed_for_new_connections() -> None:
    connections = limited(most=3, share=2)
    first, second, other = admitted(connections, "a", "a", "b")
    for one in (first, second):
        connections.set_running(one, running=True, now=0)
    assert connections.admit(Fake("c"), 5)
    assert (first.evicted, second.evicted, len(other.evicted)) == ([], [], 1)


def test_the_reserve_is_bounded() -> None:
    connections = limited(most=1, share=1)
    (running,) = admitted(connections, "a")
    connections.set_running(running, running=True, now=0)
    above = [Fake("b") for _ in range(RESERVE + 1)]
    assert not any(connections.admit(one, 0) for one in above)
    assert [bool(one.evicted) for one in above] == [True] + [False] * RESERVE
    assert connections.count == 1 + RESERVE
    for one in (running, *above, *above):
        connections.remove(one)
    assert connections.count == 0
    admitted(connections, "c")


def test_the_connection_with_the_largest_partial_body_is_closed() -> None:
    connections = limited(max_buffered_body_mb=1)
    small, large, late = admitted(connections, "a", "a", "b")
    connections.set_buffered(small, 300_000)
    connections.set_buffered(large, 700_000)
    connections.set_buffered(late, 48_576)
    assert not any(one.evicted for one in (small, large, late))
    connections.set_buffered(late, 48_577)
    assert (small.evicted, len(large.evicted), late.evicted) == ([], 1, [])
    connections.remove(small)
    connections.set_buffered(late, 1 << 20)
    assert not late.evicted


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("127.0.0.1", 5), "127.0.0.1"),
        (("2001:db8:1:2:3::4", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (("::ffff:10.0.0.7", 5), "10.0.0.7"),
        (None, ""),
        (("a socket", 5), "a socket"),
    ],
)
def test_what_connections_are_counted_by(peer: tuple[str, int] | None, address: str) -> None:
    assert client_address(peer) == address


def of(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """Makes the process have these limits; what it sets them to."""
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: changed[-1] if changed else (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    return changed


def test_connections_stay_below_the_descriptor_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ConnectionLimits()
    for soft, budget in (
        (1 << 20, (4096, 1024)),
        (resource.RLIM_INFINITY, (4096, 1024)),
        (6240, (4096, 1024)),
        (6235, (4092, 1023)),
        (1024, (469, 117)),
        (256, (60, 15)),
    ):
        of(monkeypatch, soft, soft)
        found = within_descriptors(limits)
        assert (found.max_connections, found.grpc_connections) == budget, soft
    of(monkeypatch, 64, 64)
    with pytest.raises(BatonError, match="open files is too low"):
        within_descriptors(limits)


def test_grpc_has_a_quarter_of_the_connections() -> None:
    for most, grpc in ((4096, 1024), (100, 25), (8, 8)):
        assert ConnectionLimits(max_connections=most).grpc_connections == grpc
    assert ConnectionLimits(max_grpc_connections=12).grpc_connections == 12


def test_the_soft_limit_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    for soft, hard, raised in (
        (1024, 1 << 20, [(6240, 1 << 20)]),
        (1024, 4096, [(4096, 4096)]),
        (1024, infinite, [(6240, infinite)]),
        (6240, 1 << 20, []),
        (infinite, infinite, []),
    ):
        changed = of(monkeypatch, soft, hard)
        raise_descriptor_limit(ConnectionLimits())
        assert changed == raised
