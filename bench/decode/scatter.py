"""Three ways to move a handoff's bytes from staging into its reserved blocks."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

from services.common.config.transfer import TransferConfig

if TYPE_CHECKING:
    from baton.device.link_device import LinkDevice
    from baton.device.stream import Event
    from baton.engine.memory.blocks import BlockTables
    from baton.v1.decode_pb2 import TicketBody
    from bench.decode.engine import DecodeEngine
    from services.worker.engine.decode.side import DecodeSide

# Sequences whose KV stands in pinned memory, taken in turn.
_STANDING = 4
# Blocks whose copies are under way at once: enough to keep the copy engine busy between two turns.
_UNDER_WAY = 2
# As a worker's configuration and an engine's turn have them.
_PIECE_BYTES = TransferConfig().piece_bytes
_PIECES_A_TURN = 8


class Scatter(Protocol):
    """Moves the KV of whole prompts, for one engine's loop."""

    def begin(self, body: TicketBody) -> int:
        """Begins to fill the ticket's blocks; returns the number of bytes."""

    def step(self) -> None:
        """The work of one turn of the loop."""

    def ended(self, body: TicketBody) -> bool:
        """Whether all bytes are in their blocks."""


def _blocks(decode: DecodeSide, body: TicketBody) -> BlockTables:
    entry = decode.tickets.find_transfer(body.transfer_id)
    assert entry is not None, "a ticket lives until its blocks have arrived"
    tables = zip(entry.reservation.blocks, body.block_counts, strict=True)
    return tuple(blocks[:count] for blocks, count in tables)


def _ended(left: Counter[int], body: TicketBody) -> bool:
    if left[body.transfer_id]:
        return False
    del left[body.transfer_id]
    return True


class StagedScatter:
    """Like the receiving end of a link between GPUs of a host: a staging window on the GPU and the link's
    kernel, which verifies the checksum as it scatters. The bytes are there from the beginning, since a
    sender's writes would use none of this GPU's multiprocessors, unlike a copy within it."""

    def __init__(
        self, engine: DecodeEngine, decode: DecodeSide, context: int, device: LinkDevice | None = None
    ) -> None:
        from baton.device.cuda_link_device import CudaLinkDevice
        from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
        from kvtransfer.device.mover import warm
        from kvtransfer.device.piece_memory import PieceMemory
        from kvtransfer.device.scatter import DeviceScatter

        device = device or CudaLinkDevice(engine.decoder.device)
        blocks = DeviceBlocks(device, engine.model.cache.storage)
        if engine.decoder.device.type == "cuda":
            warm(blocks)
        sink = DeviceSink(blocks, decode.sink.place, steps_run=lambda: True)
        self._decode = decode
        self._block_bytes = blocks.block_bytes
        self._piece_bytes = sink.piece_bytes
        self._window = PieceMemory(device, sink.window_pieces, sink.piece_bytes)
        self._scatter = DeviceScatter(sink, self._window)
        self._free = list(range(sink.window_pieces))
        self._waiting: deque[tuple[int, int, int, int]] = deque()  # transfer, group, first ordinal, blocks
        self._left: Counter[int] = Counter()
        self._begun = 0

    def begin(self, body: TicketBody) -> int:
        total = 0
        for group, (blocks, size) in enumerate(
            zip(_blocks(self._decode, body), self._block_bytes, strict=True)
        ):
            total += len(blocks) * size
            most = self._piece_bytes // size
            for ordinal in range(0, len(blocks), most):
                count = min(most, len(blocks) - ordinal)
                self._waiting.append((body.transfer_id, group, ordinal, count))
                self._left[body.transfer_id] += 1
        self.step()
        return total

    def step(self) -> None:
        from kvtransfer.protocol.frames import Piece

        for moved in self._scatter.moved(lambda piece: piece.checksum):
            self._left[moved.piece.transfer] -= 1
            self._free.append(moved.piece.staging)
        while self._waiting and self._free:
            transfer, group, ordinal, blocks = self._waiting.popleft()
            length, index = blocks * self._block_bytes[group], self._free.pop()
            self._scatter.begin(Piece(transfer, group, ordinal, 0, length, index, 0), blocks, blocks)
            self._begun += 1
        self._scatter.start(self._begun)

    def ended(self, body: TicketBody) -> bool:
        return _ended(self._left, body)


class PinnedScatter:
    """Copies on a stream of its own, one per block, few at a time."""

    def __init__(self, engine: DecodeEngine, decode: DecodeSide, context: int) -> None:
        from baton.engine.memory.host_blocks import HostBlocks

        groups = engine.model.layout.groups
        counts = engine.model.pools.counts_for(context)
        size = sum(group.block_bytes for group in groups) * max(counts)
        self._decode = decode
        self._groups = len(groups)
        self._bytes = sum(n * group.block_bytes for n, group in zip(counts, groups, strict=True))
        self._host = HostBlocks(engine.model.cache, _STANDING * size)
        self._standing = deque(
            self._host.save(tuple(tuple(range(1, 1 + n)) for n in counts)) for _ in range(_STANDING)
        )
        for _, copy in self._standing:
            copy.synchronize()
        # (transfer, group, place here, block there), and of each transfer how many are not in place.
        self._pieces: deque[tuple[int, int, int, int]] = deque()
        self._copies: deque[tuple[int, Event]] = deque()
        self._left: Counter[int] = Counter()

    def begin(self, body: TicketBody) -> int:
        self._standing.rotate()
        places = self._standing[0][0]
        for group, blocks in enumerate(_blocks(self._decode, body)):
            self._left[body.transfer_id] += len(blocks)
            pairs = zip(places[group], blocks, strict=True)
            self._pieces.extend((body.transfer_id, group, place, block) for place, block in pairs)
        self.step()
        return self._bytes

    def step(self) -> None:
        from baton.engine.memory.host_blocks import Saved

        while self._copies and self._copies[0][1].query():
            self._left[self._copies.popleft()[0]] -= 1
        while self._pieces and len(self._copies) < _UNDER_WAY:
            transfer, group, place, block = self._pieces.popleft()
            saved, blocks = Saved(self._alone(group, place)), self._alone(group, block)
            self._copies.append((transfer, self._host.load(saved, blocks)))

    def _alone(self, group: int, block: int) -> BlockTables:
        """A block table with one block."""
        return tuple((block,) if other == group else () for other in range(self._groups))

    def ended(self, body: TicketBody) -> bool:
        return _ended(self._left, body)


class PiecesScatter:
    """Copies in the loop, some pieces per turn."""

    def __init__(self, engine: DecodeEngine, decode: DecodeSide, context: int) -> None:
        self._decode = decode
        self._layout = engine.model.layout
        self._data = memoryview(bytearray(range(256)) * (_PIECE_BYTES // 256))
        self._pieces: deque[tuple[int, int, int, int, int]] = deque()
        self._left: Counter[int] = Counter()

    def begin(self, body: TicketBody) -> int:
        total = 0
        for group, (blocks, shape) in enumerate(
            zip(_blocks(self._decode, body), self._layout.groups, strict=True)
        ):
            for ordinal in range(len(blocks)):
                for offset in range(0, shape.block_bytes, _PIECE_BYTES):
                    size = min(_PIECE_BYTES, shape.block_bytes - offset)
                    self._pieces.append((body.transfer_id, group, ordinal, offset, size))
                    self._left[body.transfer_id] += 1
                    total += size
        return total

    def step(self) -> None:
        for _ in range(min(_PIECES_A_TURN, len(self._pieces))):
            transfer, group, ordinal, offset, size = self._pieces.popleft()
            self._decode.sink.scatter(transfer, group, ordinal, offset, self._data[:size])
            self._left[transfer] -= 1

    def ended(self, body: TicketBody) -> bool:
        return _ended(self._left, body)
