"""One end of a link in a process of its own, to be killed or frozen by a test.

python -m tests.kvtransfer.remote_peer send ADDRESS     begins transfer 1 of 64 blocks, for ever slow
python -m tests.kvtransfer.remote_peer receive          prints its address, takes transfer 1
"""

from __future__ import annotations

import sys
import threading
import time

from kvtransfer.ticket import TicketSigner
from tests.kvtransfer.peers import SECRET, Peers, Shape, Store, make_receiver, make_sender

SHAPE = Shape(block_bytes=(8192,), window_pieces=4, timeout_s=1.0)
BLOCKS = [list(range(64))]


def send(address: str) -> None:
    woken = threading.Event()
    store = Store(SHAPE.block_bytes, SHAPE.blocks, 1)
    sender = make_sender(SHAPE, store, woken.set, time.monotonic, None)
    ticket = Peers.ticket(_Addressed(address), 1, [64])  # type: ignore[arg-type]
    transfer = sender.begin(*ticket)
    for ordinal in range(64):
        store.pin(0, ordinal)
        transfer.push(0, ordinal, ordinal)
    print("begun", flush=True)
    while True:
        time.sleep(0.02)
        sender.poll(1)


def receive() -> None:
    woken = threading.Event()
    store = Store(SHAPE.block_bytes, SHAPE.blocks, 2)
    store.places[1] = BLOCKS
    receiver = make_receiver(SHAPE, store, woken.set, time.monotonic)
    address = receiver.listen("127.0.0.1")
    receiver.expect(1, [64])
    print(address, flush=True)
    while True:
        time.sleep(0.02)
        receiver.poll(1)


class _Addressed:
    """What `Peers.ticket` needs of a pair of peers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.signer = TicketSigner(SECRET)


if __name__ == "__main__":
    send(sys.argv[2]) if sys.argv[1] == "send" else receive()
