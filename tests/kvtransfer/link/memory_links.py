"""Links over the memory transport, on a virtual clock."""

from __future__ import annotations

import threading

from kvtransfer.link.settings import MAX_LINKS
from tests.kvtransfer.conftest import TamperedConnector
from tests.kvtransfer.support.memory_transport import MemoryTransport
from tests.kvtransfer.support.peers import FakeClock, Peers, Shape, make_peers

SHAPE = Shape(block_bytes=(8192,), window_pieces=4)


class Memory:
    """Peers over the memory transport, on a virtual clock."""

    def __init__(self, shape: Shape = SHAPE, max_links: int = MAX_LINKS) -> None:
        woken = threading.Event()
        self.clock = FakeClock()
        self.transport = MemoryTransport(woken.set)
        self.connector = TamperedConnector(self.transport, "memory")
        self.peers = make_peers(
            shape,
            listener=self.transport,
            connectors=[self.connector],
            clock=self.clock,
            woken=woken,
            max_links=max_links,
        )

    def half_way(self, transfer: int = 1) -> Peers:
        """A transfer of 20 blocks, some of which have arrived."""
        self.peers.send(transfer, [list(range(20))], [list(range(20))])
        self.peers.run_until(lambda: len(self.peers.sink.scattered) >= 7)
        return self.peers
