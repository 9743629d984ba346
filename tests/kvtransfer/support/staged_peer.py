"""One end of a link in a process of its own, which comes to a stage and stays there, to be killed or frozen.

    python -m tests.kvtransfer.support.staged_peer send NAME INCARNATION ADDRESS TRANSFER STAGE TRANSPORT
        prints `ready`, then STAGE when it is there, `failed` if its transfer fails
    python -m tests.kvtransfer.support.staged_peer receive INCARNATION TRANSFER ANSWERS TRANSPORT
        prints its address; answers commits if ANSWERS is 1

A sender takes the transport that ADDRESS names; TRANSPORT also names the kind of device (`rig_of`).

A sender's stages: `linked` (a link, and no transfer), `receiving` (half its blocks are sent), `sent` (all
are, and no commit), `committed` (and acknowledged), `works` (TRANSFER, TRANSFER + 1, … one after the other).
A receiver's stage is its sender's to choose.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TypeVar

from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import Attempt
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.link.interfaces import Connector
from kvtransfer.link.settings import LinkSettings, WindowSettings
from kvtransfer.protocol.addresses import GRPC, IPC, NCCL, Endpoint, to_text
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import Committed
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.events import Acknowledged, Failed
from kvtransfer.sender.sender import Sender
from kvtransfer.sender.transfer import Transfer
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.registry import make_connectors
from tests.kvtransfer.support.device_rigs import DeviceRig, rig_of
from tests.kvtransfer.support.owned_blocks import Sink, Source
from tests.kvtransfer.support.peers import FINGERPRINT, SECRET, identity

BLOCK_BYTES = (8192,)
PIECE_BYTES = 4096
BLOCKS = 16
WINDOW = 8
# What workers have by default: guarantees must hold with it.
TIMEOUT_S = 10.0
Blocks = TypeVar("Blocks", Source, Sink)
STAGES = ("linked", "receiving", "sent", "committed")


def ticket_for(address: str, incarnation: int, transfer: int, blocks: int) -> tuple[Ticket, TicketBody]:
    body = TicketBody(
        attempt=Attempt(request_id=transfer.to_bytes(16, "little"), number=1),
        issuer=identity("receiver", incarnation),
        endpoints=[endpoint.message() for endpoint in endpoints_of(address)],
        transfer_id=transfer,
        block_counts=[blocks],
        token_count=1,
        fingerprint=FINGERPRINT,
    )
    return TicketSigner(SECRET).sign(body), body


def endpoints_of(text: str) -> list[Endpoint]:
    """Parses endpoints that `to_text` wrote."""
    words = [word.partition(":") for word in text.split()]
    known = [
        (scheme, rest) if scheme in (IPC, NCCL) else (GRPC, f"{scheme}:{rest}") for scheme, _, rest in words
    ]
    return [Endpoint(transport, address) for transport, address in known]


def push(transfer: Transfer, source: Source, ordinals: range) -> None:
    for ordinal in ordinals:
        transfer.push(0, ordinal, [source.write(transfer.transfer_id, 0, ordinal)])


def commit(transfer: Transfer) -> None:
    transfer.commit(CommitRecord(attempt=transfer.body.attempt, token_ids=[1], prompt_length=1))


def blocks_on(rig: DeviceRig | None, kind: type[Blocks], blocks: int) -> Blocks:
    """A source or a sink where this end's device reaches it."""
    return kind(BLOCK_BYTES, blocks) if rig is None else kind(BLOCK_BYTES, blocks, rig.array)


def make_sender(
    name: str,
    incarnation: int,
    source: Source,
    wake: threading.Event,
    rig: DeviceRig | None = None,
    transport: str = "auto",
) -> Sender:
    on_device = None
    if rig is not None:
        on_device = DeviceBlocks(rig.sender, [rig.tensor(array, rig.sender) for array in source.bytes])
    if transport.startswith(NCCL):
        from tests.kvtransfer.support.nccl_transport import nccl_connector

        connectors: Sequence[Connector] = (nccl_connector(wake.set, rig, on_device, TIMEOUT_S),)
    else:
        connectors = make_connectors("auto", wake.set, on_device)
    return Sender(
        settings=LinkSettings(identity(name, incarnation), FINGERPRINT, BLOCK_BYTES, TIMEOUT_S),
        source=source, wake=wake.set, connectors=connectors,
    )  # fmt: skip


def make_receiver(
    incarnation: int, sink: Sink, wake: threading.Event, rig: DeviceRig | None = None
) -> Receiver:
    device = None
    if rig is not None:
        on_device = DeviceBlocks(rig.receiver, [rig.tensor(array, rig.receiver) for array in sink.bytes])
        device = DeviceSink(on_device, sink.place, window_pieces=WINDOW, piece_bytes=PIECE_BYTES)
    return Receiver(
        settings=LinkSettings(identity("receiver", incarnation), FINGERPRINT, BLOCK_BYTES, TIMEOUT_S),
        window=WindowSettings(PIECE_BYTES, WINDOW), signer=TicketSigner(SECRET),
        sink=sink, wake=wake.set, device=device,
    )  # fmt: skip


def listen(receiver: Receiver, transport: str, wake: threading.Event, rig: DeviceRig | None) -> str:
    """Starts to listen and returns the address."""
    if not transport.startswith(NCCL):
        return to_text(receiver.listen(ListenConfig("127.0.0.1", transport=transport.partition("-")[0])))
    from tests.kvtransfer.support.nccl_transport import nccl_listener

    over_nccl = nccl_listener(wake.set, rig, TIMEOUT_S)
    receiver.attach(over_nccl)
    return str(over_nccl.endpoint)


def send(name: str, incarnation: int, address: str, transfer_id: int, stage: str, transport: str) -> None:
    rig = rig_of(transport, at_once=True)
    woken, source = threading.Event(), blocks_on(rig, Source, BLOCKS)
    sender = make_sender(name, incarnation, source, woken, rig, transport)
    blocks = 0 if stage == "linked" else BLOCKS
    half = range(BLOCKS // 2) if stage == "receiving" else range(blocks)

    def begin(number: int) -> Transfer:
        transfer = sender.begin(*ticket_for(address, 1, number, blocks))
        push(transfer, source, half)
        if stage not in ("receiving", "sent"):
            commit(transfer)
        return transfer

    _print("ready")
    begin(transfer_id)
    there = False
    while True:
        for event in sender.poll(4):
            match event:
                case Acknowledged() if stage == "works":
                    begin(event.transfer.transfer_id + 1)
                case Acknowledged():
                    there = True
                    _print(stage)
                case Failed():
                    _print("failed")
        if not there and stage in ("receiving", "sent") and not source.pins:
            there = True
            _print(stage)
        woken.wait(0.001 if sender.busy_poll else 0.02)
        woken.clear()


def receive(incarnation: int, transfer_id: int, answers: bool, transport: str) -> None:
    rig = rig_of(transport, at_once=True)
    woken, sink = threading.Event(), blocks_on(rig, Sink, 2 * BLOCKS)
    receiver = make_receiver(incarnation, sink, woken, rig)
    address = listen(receiver, transport, woken, rig)

    def expect(number: int) -> None:
        sink.reserve(number, [BLOCKS])
        receiver.transfers.expect(number, [BLOCKS])

    expect(transfer_id)
    _print(address)
    while True:
        for event in receiver.poll(4):
            if isinstance(event, Committed) and answers:
                assert sink.check(event.transfer_id, sink.places[event.transfer_id]) == 0
                sink.release(event.transfer_id)
                expect(event.transfer_id + 1)
                receiver.transfers.acknowledge(event.transfer_id)
        woken.wait(0.001 if receiver.busy_poll else 0.02)
        woken.clear()


def _print(word: str) -> None:
    print(word, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), *sys.argv[6:])
    else:
        receive(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", sys.argv[5])
