"""The receiver that `bench.transfer` sends to, in a process of its own; and blocks, tickets, raw
bytes.

    python -m bench.transfer.ends BLOCKS TRANSPORT DEVICE
                                      a receiver; writes {"endpoints", "raw_address"}, then for each line
                                      {"transfer", "blocks"} on stdin expects that transfer, answers {}, for
                                      {"verified": true} when the last transfer's commit was found
                                      right with all its bytes in their blocks, on the monotonic clock;
                                      {"compare": blocks} whether what came last is what was sent;
                                      {"raw_id", "size"}, then {"raw_receive"}: `RawEnd`

Blocks lie in plain memory or a GPU's, in random order on both sides. Raw bytes go over grpc as pieces do, in
messages of the same size on one stream, to a server that drops them: what is left out is all that is ours.
"""

from __future__ import annotations

import json
import random
import secrets
import selectors
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from baton.base.process_tuning import keep_freed_memory, sharpen_timers
from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.types_pb2 import Attempt, WorkerIdentity
from bench.processes import JsonLinesProcess
from kvtransfer.device.blocks import DeviceSink, LinkBlocks
from kvtransfer.link.settings import LinkSettings, WindowSettings
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.frames import HEADER_BYTES
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import Committed
from kvtransfer.receiver.inbound_transfer import BlockSink
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.transports.grpc.stream import channel_options
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from services.common.config.transfer import TransferConfig

if TYPE_CHECKING:
    from bench.transfer.devices import GpuBlocks, RawEnd

BLOCK_BYTES = 1 << 20
FINGERPRINT = b"bench".ljust(32)
_SECRET = b"both processes of one measurement"
_RAW = "/bench.Raw/Drop"
PIECES_A_POLL = 8  # as in an engine's turn
PIECES_A_POLL_ON_GPU = 32
WAIT_S = 0.05
_POLL_SOON_S = 0.00002
TRANSFER_S = 60.0
TRANSFER = TransferConfig()


def ticket_for(endpoints: Iterable[tuple[str, str]], transfer: int, blocks: int) -> tuple[Ticket, TicketBody]:
    """A ticket that this module's receiver accepts. `endpoints`: transport and address of each."""
    body = TicketBody(
        attempt=Attempt(request_id=secrets.token_bytes(16), number=1),
        issuer=_identity("receiver"),
        endpoints=[Endpoint(transport, address).message() for transport, address in endpoints],
        transfer_id=transfer,
        block_counts=[blocks],
        token_count=1,
        fingerprint=FINGERPRINT,
    )
    return TicketSigner(_SECRET).sign(body), body


class Blocks:
    """A pool of random blocks, as source and sink; the place of a transfer's nth block is drawn in
    advance."""

    def __init__(self, count: int, block_bytes: int = BLOCK_BYTES) -> None:
        self._bytes = np.random.default_rng(0).integers(0, 256, (count, block_bytes), dtype=np.uint8)
        self._places = random.Random(1).sample(range(count), count)

    def read(self, group: int, block: int, offset: int, length: int) -> memoryview:
        return self._bytes[self._places[block], offset : offset + length].data

    def place(self, ordinal: int) -> int:
        """The pool's number of a sender's nth block."""
        return ordinal

    def unpin(self, group: int, block: int) -> None:
        """Does nothing: blocks are not shared."""

    def equal(self, blocks: int) -> bool:
        """True if the last transfer's first blocks equal those of a sender's `Blocks`."""
        sent = Blocks(len(self._bytes))
        return all(
            np.array_equal(self._bytes[self._places[n]], sent._bytes[sent._places[n]]) for n in range(blocks)
        )

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        place = self._bytes[self._places[ordinal], offset : offset + len(data)]
        place[:] = np.frombuffer(data, dtype=np.uint8)


class ReceiverProcess(JsonLinesProcess):
    """A receiver in a process of its own."""

    def __init__(self, blocks: int, transport: str, device: str = "cpu") -> None:
        self._transport = transport
        super().__init__("bench.transfer.ends", str(blocks), transport, device)

    def expect(self, transfer: int, blocks: int) -> None:
        self.call({"transfer": transfer, "blocks": blocks})

    def verified_at(self) -> float:
        """Time at which the last transfer was committed, by the host's monotonic clock in s."""
        return float(self.call({"verified": True})["at"])

    def compare(self, blocks: int) -> None:
        """AssertionError unless the last transfer's blocks equal what was sent."""
        assert self.call({"compare": blocks})["equal"], "what arrived is not what was sent"

    def raw_seconds(self, megabytes: int) -> float:
        """The time in s of as many bytes over the transport alone."""
        if self._transport == "ipc":
            return copy_seconds(megabytes)
        return raw_seconds(self.ready_line["raw_address"], megabytes)


@contextmanager
def receiver_process(blocks: int, transport: str, device: str = "cpu") -> Iterator[ReceiverProcess]:
    """A receiver that is closed on exit."""
    receiver = ReceiverProcess(blocks, transport, device)
    try:
        yield receiver
    finally:
        receiver.end()


def raw_seconds(address: str, megabytes: int) -> float:
    """The time in s of as many bytes in messages of one piece each, until the server has received the
    last."""
    messages = -(-blocks_for(megabytes) * BLOCK_BYTES // TRANSFER.piece_bytes)
    message = np.random.default_rng(2).bytes(TRANSFER.piece_bytes + HEADER_BYTES)
    options = channel_options(TRANSFER.piece_bytes, TRANSFER.peer_timeout_s)
    with grpc.insecure_channel(address, options=options) as channel:
        grpc.channel_ready_future(channel).result(timeout=5)
        call = channel.stream_unary(_RAW, request_serializer=None, response_deserializer=None)
        begun = time.monotonic()
        call((message for _ in range(messages)), timeout=TRANSFER_S)
        return time.monotonic() - begun


def copy_seconds(megabytes: int) -> float:
    """The time in s to copy as many bytes into a window of shared memory, piece by piece, from scattered
    blocks."""
    blocks = blocks_for(megabytes)
    source = Blocks(blocks)
    shared = SharedMemory.create("bench-window", TRANSFER.window_pieces * BLOCK_BYTES)
    window = shared.bytes.reshape(TRANSFER.window_pieces, BLOCK_BYTES)
    window[:] = 1  # its pages are there
    begun = time.monotonic()
    for block in range(blocks):
        window[block % TRANSFER.window_pieces] = np.frombuffer(
            source.read(0, block, 0, BLOCK_BYTES), np.uint8
        )
    seconds = time.monotonic() - begun
    shared.drop_descriptor()
    return seconds


def block_bytes_on(device: str) -> int:
    if device == "cpu":
        return BLOCK_BYTES
    from bench.transfer.devices import GPU_BLOCK_BYTES

    return GPU_BLOCK_BYTES


def blocks_for(megabytes: int, device: str = "cpu") -> int:
    """Number of whole blocks that hold this many 10^6 bytes."""
    return -(-megabytes * 10**6 // block_bytes_on(device))


def _identity(name: str) -> WorkerIdentity:
    return WorkerIdentity(name=name, incarnation=b"b" * 16, rank=0, rank_count=1)


def _raw_server() -> tuple[grpc.Server, str]:
    def drop(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        for _ in messages:
            pass
        return b""

    options = channel_options(TRANSFER.piece_bytes, TRANSFER.peer_timeout_s)
    server = grpc.server(ThreadPoolExecutor(2), options=options)
    service, method = _RAW[1:].split("/")
    handler = grpc.stream_unary_rpc_method_handler(drop)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


def main() -> None:
    """Runs a receiver that expects the transfers named on stdin, until stdin closes."""
    keep_freed_memory()
    sharpen_timers()
    wakeup = Wakeup()
    blocks, transport, where = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sink, device = _sink(blocks, where)
    receiver = receiver_of(sink, block_bytes_on(where), wakeup.set, device)
    server, raw_address = _raw_server()
    nccl = nccl_links_for(transport, None if device is None else device.blocks)
    endpoints = receiver.listen(ListenConfig("127.0.0.1", transport=transport, nccl=nccl))
    _report({"endpoints": [(one.transport, one.address) for one in endpoints], "raw_address": raw_address})
    selector = selectors.SelectSelector()  # as an engine's: epoll's waits are whole milliseconds
    selector.register(wakeup, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    raw: RawEnd | None = None
    verified_at = 0.0
    while True:
        poll_s = 0.0 if receiver.busy_poll else _POLL_SOON_S if receiver.poll_soon else WAIT_S
        ready = [key.fileobj for key, _ in selector.select(poll_s)]
        wakeup.clear()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                break
            job = json.loads(line)
            answer: dict[str, bool | float] = {}
            if "transfer" in job:
                receiver.transfers.expect(job["transfer"], [job["blocks"]])
            elif "verified" in job:
                answer["at"] = verified_at
            elif "compare" in job:
                answer["equal"] = sink.equal(job["compare"])
            elif "raw_id" in job:
                raw = _raw_end(job, where)
            elif raw is not None:
                raw.receive()
            _report(answer)
        for event in receiver.poll(PIECES_A_POLL if device is None else PIECES_A_POLL_ON_GPU):
            if isinstance(event, Committed):
                verified_at = time.monotonic()
                receiver.transfers.acknowledge(event.transfer_id)
    receiver.close()
    server.stop(0)
    if raw is not None:
        raw.close()


def _raw_end(job: dict[str, Any], device: str) -> RawEnd:
    from bench.transfer.devices import RawEnd

    return RawEnd(bytes.fromhex(job["raw_id"]), job["size"], device, sends=False)


def receiver_of(
    sink: BlockSink, block_bytes: int, wake: Callable[[], None], device: DeviceSink | None
) -> Receiver:
    """A receiver that accepts tickets of `ticket_for`, without listeners."""
    return Receiver(
        settings=LinkSettings(
            _identity("receiver"), FINGERPRINT, [block_bytes], TRANSFER.peer_timeout_s
        ),
        window=WindowSettings(TRANSFER.piece_bytes, TRANSFER.window_pieces),
        signer=TicketSigner(_SECRET), sink=sink, wake=wake, device=device,
    )  # fmt: skip


def nccl_links_for(transport: str, blocks: LinkBlocks | None) -> NcclEndpoint | None:
    """This process's NCCL, where the measurement is over nccl."""
    if transport != "nccl" or blocks is None:
        return None
    from baton.device.nccl.cuda_nccl import CudaNccl

    return NcclEndpoint(blocks.device, CudaNccl(blocks.device.tensors_on))


def _sink(blocks: int, device: str) -> tuple[Blocks | GpuBlocks, DeviceSink | None]:
    if device == "cpu":
        return Blocks(blocks), None
    from bench.transfer.devices import gpu_blocks

    sink = gpu_blocks(blocks, device)
    return sink, sink.sink()


def _report(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
