"""How a handoff's bytes come from staging into the blocks reserved for them, in two ways."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from baton.engine.blocks import BlockTables
    from baton.engine.host_blocks import Copy
    from baton.v1.decode_pb2 import TicketBody
    from bench.decode_engine import DecodeEngine
    from services.worker.decode_side import DecodeSide

# Sequences whose KV stands in pinned memory, taken in turn.
_STANDING = 4
# As a worker's configuration and loop have them.
_PIECE_BYTES = 256 * 1024
_PIECES_A_TURN = 16


class Scatter(Protocol):
    """Moves whole prompts' KV; of one engine's loop."""

    def begin(self, body: TicketBody) -> int:
        """From now on the ticket's blocks are filled; how many bytes that is."""

    def step(self) -> None:
        """What this turn of the loop has to do for it."""

    def ended(self, body: TicketBody) -> bool:
        """Whether all bytes are in their blocks."""


def _blocks(decode: DecodeSide, body: TicketBody) -> BlockTables:
    from kvtransfer.ticket_book import AttemptKey

    return decode.blocks_of(body.transfer_id, AttemptKey.of(body.attempt), body.token_count)


class PinnedScatter:
    """Copies on a stream of their own, a block each."""

    def __init__(self, engine: DecodeEngine, decode: DecodeSide, context: int) -> None:
        from baton.engine.host_blocks import HostBlocks

        groups = engine.model.layout.groups
        counts = engine.model.pools.counts_for(context)
        size = sum(group.block_bytes for group in groups) * max(counts)
        self._decode = decode
        self._bytes = sum(n * group.block_bytes for n, group in zip(counts, groups, strict=True))
        self._host = HostBlocks(engine.model.cache, _STANDING * size)
        self._standing = deque(
            self._host.save(tuple(tuple(range(1, 1 + n)) for n in counts)) for _ in range(_STANDING)
        )
        for _, copy in self._standing:
            copy.wait()
        self._copies: dict[int, Copy] = {}

    def begin(self, body: TicketBody) -> int:
        self._standing.rotate()
        self._copies[body.transfer_id] = self._host.load(self._standing[0][0], _blocks(self._decode, body))
        return self._bytes

    def step(self) -> None:
        """Nothing: the GPU copies by itself."""

    def ended(self, body: TicketBody) -> bool:
        if not self._copies[body.transfer_id].ended():
            return False
        del self._copies[body.transfer_id]
        return True


class PiecesScatter:
    """Copies by the loop's own hands, some pieces a turn."""

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
            self._decode.scatter(transfer, group, ordinal, offset, self._data[:size])
            self._left[transfer] -= 1

    def ended(self, body: TicketBody) -> bool:
        if self._left[body.transfer_id]:
            return False
        del self._left[body.transfer_id]
        return True
