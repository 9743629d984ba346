"""Properties of the ipc transport alone: a socket, shared memory, and a fence of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import cast

import numpy as np
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.device.shared_memory import SharedMemory
from baton.v1.transfer_pb2 import OpenLinkResponse, SignedOpenLinkRequest
from kvtransfer.link.interfaces import UnreachableError
from kvtransfer.link.settings import ListenerSettings
from kvtransfer.protocol.addresses import IPC, Endpoint
from kvtransfer.protocol.handshake import link_request
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.ipc import control as ipc_control
from kvtransfer.transports.ipc.byte_ring import CAPACITY, RING_BYTES
from kvtransfer.transports.ipc.connector import IpcConnector
from kvtransfer.transports.ipc.control import (
    VERSION,
    ControlByte,
    receive_message,
    send_message,
    socket_name,
)
from kvtransfer.transports.ipc.listener import IpcListener
from kvtransfer.transports.ipc.probe_page import NONCE_BYTES, answer_to
from kvtransfer.transports.ipc.sender_wire import IpcSenderWire
from kvtransfer.transports.registry import make_connectors
from tests.kvtransfer.support.peers import FINGERPRINT, Peers, Shape, identity, make_peers

REQUEST = link_request(identity("raw"), identity("receiver").incarnation, FINGERPRINT, 1)


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = make_peers(Shape(timeout_s=5.0), transport="ipc", connectors=make_connectors("ipc", lambda: None))
    yield made
    made.close()


@pytest.fixture
def raw(peers: Peers) -> Iterator[socket.socket]:
    """A connection that has not sent anything yet."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(socket_name(peers.address))
    yield sock
    sock.close()


def hello_to(raw: socket.socket, auth: LinkAuth) -> SignedOpenLinkRequest:
    """Sends it; before that no memory is given out."""
    _, greeting, descriptor = receive_message(raw, 1.0)
    assert greeting.startswith(VERSION)
    assert descriptor is None
    hello = auth.hello(REQUEST, greeting.removeprefix(VERSION))
    send_message(raw, 0, hello.SerializeToString())
    return hello


def page_of(raw: socket.socket) -> SharedMemory:
    auth = LinkAuth()
    hello = hello_to(raw, auth)
    _, proof, descriptor = receive_message(raw, 1.0)
    auth.verify_probe(hello, proof)
    assert descriptor is not None
    page = SharedMemory.attach(descriptor)
    page.drop_descriptor()
    return page


def prove(page: SharedMemory) -> None:
    nonce = page.bytes[:NONCE_BYTES].tobytes()
    page.bytes[NONCE_BYTES : 2 * NONCE_BYTES] = np.frombuffer(answer_to(nonce), dtype=np.uint8)


def asked(peers: Peers, ask: Callable[[], object]) -> list[object]:
    """Runs a blocking call in a thread while the receiver polls; its result, or what it raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(ask())
        except BatonError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    peers.run_until(lambda: not thread.is_alive())
    thread.join()
    return outcome


def open_link(peers: Peers) -> tuple[OpenLinkResponse, IpcSenderWire]:
    connector = IpcConnector(lambda: None)
    (opened,) = asked(peers, lambda: connector.open(peers.endpoints[0], REQUEST, 3.0))
    assert isinstance(opened, tuple)
    return opened


def test_a_sender_that_does_not_map_the_page_gets_no_link(peers: Peers, raw: socket.socket) -> None:
    page_of(raw)  # and writes nothing into it
    send_message(raw, 0, b"")
    raw.settimeout(5.0)
    assert raw.recv(1) == b""
    peers.step()
    assert peers.receiver.counters.links_opened == 0


@pytest.mark.parametrize("message", [b"", b"nonsense", b"\0" * 5, b"\0\xff\xff\xff\xff", b"\0\x03\0\0\0abc"])
def test_a_malformed_request_closes_the_connection(peers: Peers, raw: socket.socket, message: bytes) -> None:
    receive_message(raw, 1.0)
    raw.send(message)
    raw.shutdown(socket.SHUT_WR)

    def answer() -> bytes:
        raw.settimeout(5.0)
        try:
            return raw.recv(1)
        except ConnectionResetError:
            return b""

    assert asked(peers, answer)[0] in (b"", bytes([ErrorKind.UNAUTHENTICATED.value]))
    peers.send(1, [[1]], [[2]])
    peers.run_until(lambda: peers.acknowledged() == [1])
    peers.check_ledger()


def test_a_process_of_another_user_gets_nothing(
    peers: Peers, raw: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    other = socket.socket(socket.AF_UNIX)
    other.connect(socket_name(peers.address))
    with other:
        other.settimeout(5.0)
        assert other.recv(1) == b""
    assert peers.receiver.links == []


def test_a_listener_of_another_user_gets_nothing(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that binds the name after its owner ended gets neither a hello nor KV."""
    received: list[bytes] = []
    name = "baton-test-" + os.urandom(8).hex()

    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            sock.settimeout(5.0)
            received.append(sock.recv(64))

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(socket_name(name))
        server.listen(1)
        thread = threading.Thread(target=serve)
        thread.start()
        ours = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
        with pytest.raises(UnreachableError, match=f"user {ours}$"):
            IpcConnector(lambda: None).open(Endpoint(IPC, name), REQUEST, 1.0)
        thread.join()
    assert received in ([b""], [bytes((ControlByte.UNMAPPED,))])


def test_many_rejected_callers_are_logged_once(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(socket_name(peers.address))
            other.settimeout(5.0)
            assert other.recv(1) == b""
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == ["link_caller_rejected"]


def test_a_listener_of_another_version_is_unreachable() -> None:
    name = "baton-test-" + os.urandom(8).hex()
    page = SharedMemory.create("test-page", 4096)

    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            send_message(sock, 0, b"baton-ipc-9 ", page.fd)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(socket_name(name))
        server.listen(1)
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnreachableError, match="another version"):
            IpcConnector(lambda: None).open(Endpoint(IPC, name), REQUEST, 1.0)
        thread.join()
    page.drop_descriptor()


def test_no_listener() -> None:
    with pytest.raises(UnreachableError) as error:
        IpcConnector(lambda: None).open(Endpoint(IPC, "baton-absent"), REQUEST, 1.0)
    assert error.value.kind is ErrorKind.UNAVAILABLE


def test_a_sender_that_unmaps_is_fenced_though_its_process_lives(peers: Peers) -> None:
    others = mapped("baton-link")  # an earlier test's, not collected yet
    _, wire = open_link(peers)
    assert len(mapped("baton-link", others)) == 2  # one at each end, both here
    wire.close()
    assert len(mapped("baton-link", others)) == 1  # the receiver's
    peers.run_until(lambda: not peers.receiver.links)
    assert peers.receiver.counters.links_fenced == 1
    del wire
    # The thread that waited for the fence releases the link shortly after its report.
    peers.run_until(lambda: mapped("baton-link", others) == [])


def test_a_connection_that_ends_without_unmapping_is_quarantined(peers: Peers) -> None:
    """The connection's process lives and may still write: the window is neither free nor in other use."""
    others = mapped("baton-link")
    _, wire = open_link(peers)
    assert wire.control is not None
    wire.control.end()
    peers.run_until(lambda: bool(peers.receiver.links and peers.receiver.links[0].quarantined_pieces))
    time.sleep(0.1)
    peers.step()
    (link,) = peers.receiver.links
    assert link.quarantined_pieces == link.window_pieces
    assert peers.receiver.counters.links_fenced == 0
    peers.send(1, [[1]], [[2]])  # over a link of its own
    peers.run_until(lambda: peers.acknowledged() == [1])
    assert len(mapped("baton-link", others)) == 4
    wire.close()


@pytest.mark.parametrize("where", ["record", "tail"])
def test_memory_that_is_overwritten_breaks_the_link_alone(peers: Peers, where: str) -> None:
    peers.send(1, [list(range(20))], [list(range(20))])
    peers.run_until(lambda: len(peers.sink.scattered) >= 3)
    wire = peers.wires[-1]
    assert isinstance(wire, IpcSenderWire)
    peers.sender.poll(1)
    shared = wire.memory.shared
    if where == "tail":
        shared.region(0, 1, "<u8")[0] += 2 * CAPACITY
    else:
        shared.bytes[256:RING_BYTES] ^= 1
    peers.received += peers.receiver.poll(4)  # before the sender writes again
    peers.run_until(lambda: 1 in peers.failures() and 1 in peers.withdrawn())
    assert "malformed frame" in peers.failures()[1].message
    del shared, wire
    peers.run_until(lambda: not peers.receiver.links)
    peers.send(2, [[2]], [[2]])
    peers.run_until(lambda: 2 in peers.acknowledged())
    peers.check_ledger()


def test_an_unknown_control_byte_breaks_the_link(peers: Peers) -> None:
    _, wire = open_link(peers)
    assert wire.control is not None
    peers.run_until(lambda: peers.receiver.links[0].credited_pieces > 0)
    wire.control.send(cast(ControlByte, 0xEE))
    peers.run_until(lambda: wire.failure() is not None)
    assert "unknown control byte" in str(wire.failure())
    wire.close()


def test_a_silent_process_that_is_not_stopped_has_longer(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_control, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(ipc_control, "SILENCE_S", 0.0)
    monkeypatch.setattr(ipc_control, "UNRESPONSIVE_S", 0.4)
    _, wire = open_link(peers)
    monkeypatch.setattr(ipc_control.Control, "send", lambda control, byte: None)
    begun = time.monotonic()
    peers.run_until(lambda: wire.failure() is not None and peers.receiver.counters.links_broken == 1)
    assert 0.3 <= time.monotonic() - begun < 5.0
    assert "no sign of life" in str(wire.failure())
    monkeypatch.undo()
    wire.close()
    peers.run_until(lambda: not peers.receiver.links)
    assert peers.receiver.counters.links_fenced == 1


def test_a_link_granted_after_the_sender_hung_up_is_fenced(peers: Peers) -> None:
    """The sender asked, and hung up before the loop answered."""
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(socket_name(peers.address))
    prove(page_of(raw))
    send_message(raw, 0, REQUEST.SerializeToString())
    raw.send(bytes([ControlByte.UNMAPPED]))
    raw.close()
    peers.run_until(lambda: peers.receiver.counters.links_opened == 1)
    peers.run_until(lambda: not peers.receiver.links)
    assert peers.receiver.counters.links_fenced == 1


def test_close_ends_every_thread_and_descriptor() -> None:
    gc.collect()
    before, descriptors, others = set(threading.enumerate()), open_descriptors(), mapped("baton-link")
    one_transfer()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, set(threading.enumerate()) - before
        time.sleep(0.01)
    gc.collect()
    assert open_descriptors() <= descriptors
    assert mapped("baton-link", others) == []


def one_transfer() -> None:
    peers = make_peers(Shape(), transport="ipc", connectors=make_connectors("ipc", lambda: None))
    peers.send(1, [[1]], [[1]])
    peers.run_until(lambda: peers.acknowledged() == [1])
    peers.close()


def test_a_machine_that_reorders_stores_has_no_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.ipc.listener.STORES_IN_ORDER", False)
    monkeypatch.setattr("kvtransfer.transports.ipc.connector.STORES_IN_ORDER", False)
    with pytest.raises(BatonError) as error:
        IpcListener(ListenerSettings(lambda: None, 1.0, 1))
    assert error.value.kind is ErrorKind.INVALID
    with pytest.raises(UnreachableError):
        IpcConnector(lambda: None).open(Endpoint(IPC, "x"), REQUEST, 1.0)


def mapped(name: str, but: Collection[str] = ()) -> list[str]:
    """This process's new shared mappings of memory with this name."""
    with open("/proc/self/maps") as maps:
        found = [line for line in maps if f"memfd:{name} " in line or f"memfd:{name}\n" in line]
    return [line for line in found if line not in but]


def open_descriptors() -> set[str]:
    """The targets of this process's descriptors."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
    return found
