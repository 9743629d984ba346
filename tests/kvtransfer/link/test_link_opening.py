"""Links that are opened: which of two is kept, by when one is there, and how many there may be."""

from __future__ import annotations

import threading
from collections import Counter

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.handshake import link_request
from kvtransfer.receiver.link_table import FULL_WINDOWS
from tests.kvtransfer.link.memory_links import SHAPE, Memory
from tests.kvtransfer.support.memory_transport import MemorySenderWire, MemoryTransport
from tests.kvtransfer.support.peers import FINGERPRINT, Shape, identity, make_sender


class _Renaming:
    """A connector that finds the receiver whatever incarnation it is asked for, as if it had been that one
    when it was asked; `answered` links are there, whether the sender has looked or not."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._memory = transport
        self.transport = transport.transport
        self.answered = 0

    def reaches(self, endpoint: Endpoint) -> bool:
        return True

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, MemorySenderWire]:
        request.receiver_incarnation = identity("receiver").incarnation
        found = self._memory.open(endpoint, request, timeout_s)
        self.answered += 1
        return found


def test_of_two_incarnations_that_answer_at_once_the_newer_wins() -> None:
    memory = Memory()
    peers, connector = memory.peers, _Renaming(memory.transport)
    woken: list[None] = []
    peers.sender = make_sender(SHAPE, peers.source, lambda: woken.append(None), memory.clock, [connector])
    here = [endpoint.message() for endpoint in peers.endpoints]
    elsewhere = [Endpoint("memory", "2").message()]
    for incarnation, where in ((6, elsewhere), (7, here), (8, here)):
        issuer = identity("receiver", incarnation)
        ticket = peers.ticket(incarnation, [1], issuer=issuer, endpoints=where)
        peers.sender.begin(*ticket)
        while (
            len(woken) < incarnation - 5
        ):  # the thread's last act: its link is open, and the sender has not polled
            peers.receiver.poll(1)
    peers.sent += peers.sender.poll(4)
    assert connector.answered == 3
    assert [report.peer.incarnation for report in peers.sender.links] == [bytes([8]) * 16]
    assert {transfer: (error.kind, error.message) for transfer, error in peers.failures().items()} == {
        7: (ErrorKind.UNAVAILABLE, "the receiver at memory:1 has restarted"),
        # Other endpoints are not affected: that link's frames and end were handled in the same poll.
        6: (ErrorKind.UNAVAILABLE, "the link to 'receiver' broke: sender 'sender' opened a newer link"),
    }
    peers.close()


class _Hanging:
    """A connector whose answer comes when it is let go."""

    transport = "hanging"

    def __init__(self) -> None:
        self.answering = threading.Event()

    def reaches(self, endpoint: Endpoint) -> bool:
        return True

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, MemorySenderWire]:
        self.answering.wait(5)
        raise BatonError(ErrorKind.UNAVAILABLE, "let go")


def test_opening_has_a_deadline_even_if_its_thread_hangs() -> None:
    memory, hanging = Memory(), _Hanging()
    peers = memory.peers
    peers.sender = make_sender(SHAPE, peers.source, lambda: None, memory.clock, [hanging])
    transfer = peers.begin(1, [1])
    peers.push(transfer, 0, 0, 1)
    peers.step()
    memory.clock.now += 2 * SHAPE.timeout_s
    peers.run_until(lambda: 1 in peers.failures())
    assert peers.failures()[1].kind is ErrorKind.DEADLINE
    assert not peers.source.pins
    hanging.answering.set()
    peers.close()


def open_links(memory: Memory, count: int) -> list[BatonError]:
    """Opens links of senders of their own, one after the other; the refusals."""
    receiver = memory.peers.receiver
    refused: list[BatonError] = []

    def run(name: str) -> None:
        request = link_request(identity(name), identity("receiver").incarnation, FINGERPRINT, 1)
        try:
            memory.transport.open(memory.transport.endpoint, request, 2.0)
        except BatonError as error:
            refused.append(error)

    for number in range(count):
        thread = threading.Thread(target=run, args=(f"sender-{number}",))
        thread.start()
        while thread.is_alive():
            receiver.poll(1)
        thread.join()
    return refused


def test_links_are_bounded() -> None:
    """The number of links is bounded, and with it the staging memory: beyond 64, windows are small."""
    window = 32
    most = FULL_WINDOWS + 6
    memory = Memory(Shape(window_pieces=window, piece_bytes=16, block_bytes=(16,)), max_links=most)
    receiver = memory.peers.receiver
    refused = open_links(memory, most + 1)
    assert [error.kind for error in refused] == [ErrorKind.OVERLOADED]
    assert len(receiver.links) == most
    windows = Counter(link.window_pieces for link in receiver.links)
    assert windows == {window: FULL_WINDOWS, window // 8: 6}
    memory.peers.close()


def test_a_transfer_over_the_seventieth_link() -> None:
    memory = Memory()
    peers = memory.peers
    assert open_links(memory, 69) == []
    blocks = list(range(20))
    peers.send(1, [blocks], [blocks])
    peers.run_until(lambda: 1 in peers.acknowledged())
    assert len(peers.receiver.links) == 70
    assert min(link.window_pieces for link in peers.receiver.links) == 2
    peers.close()
