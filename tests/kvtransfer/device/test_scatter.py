"""Kernels launched before the bytes that they scatter arrive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from baton.device.heads.moves import HeadMoves
from baton.model_spec.layout import CacheGroup, key_value_planes
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink, DividedBlocks, LinkBlocks
from kvtransfer.device.kernels.move_plan import ROW_WORDS
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.device.scatter import DeviceScatter, MovedPiece, Outcome
from kvtransfer.protocol.checksum import PieceChecksum
from kvtransfer.protocol.frames import Piece
from tests.kvtransfer.support.fake_device import FakeDevice, Pump
from tests.support.events import FakeEvent

BLOCKS, BLOCK_BYTES, WINDOW = 8, 256, 2
PLACES = [5, 2]
PIECE = Piece(
    transfer=7, group=0, ordinal=0, offset=0, length=len(PLACES) * BLOCK_BYTES, staging=1, checksum=0
)
UNTOUCHED, SENT = 0x11, 0x42
# Two heads of four tokens: BLOCK_BYTES in all.
GROUP = CacheGroup((0,), key_value_planes("float32", 2, 4), 4)


class There(FakeEvent):
    """An event of another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], None] = lambda: None

    def query(self) -> bool:
        self.look()
        return self.complete


class Scatter:
    """One piece, announced; its bytes are in the window, or what was there before."""

    def __init__(self, ranks: int) -> None:
        """`ranks`: devices that have the heads of the blocks."""
        self.pump = Pump(11)
        self.device = device = FakeDevice(self.pump)
        shape = BLOCKS, BLOCK_BYTES // ranks
        self.pools = [torch.full(shape, UNTOUCHED, dtype=torch.uint8) for _ in range(ranks)]
        blocks: LinkBlocks = DeviceBlocks(device, self.pools)
        # What is emptied in the table of the piece, and stands for how much it moves.
        self.emptied = [2 + n * ROW_WORDS for n in range(len(PLACES))]
        if ranks > 1:
            blocks, self.emptied = DividedBlocks(device, [HeadMoves(GROUP, self.pools)]), [0]
        sink = DeviceSink(
            blocks, lambda transfer, group, ordinal: PLACES[ordinal],
            window_pieces=WINDOW, piece_bytes=PIECE.length,
        )  # fmt: skip
        self.window = PieceMemory(device, WINDOW, PIECE.length)
        self.scatter = DeviceScatter(sink, self.window)
        self.there = There()
        self.scatter.begin(PIECE, len(PLACES), len(PLACES), self.there)
        self.run()
        # The table that the piece's kernel reads: the only one with anything in it.
        (self.rows,) = (table for table in device.zeros if table.any())

    @property
    def lengths(self) -> torch.Tensor:
        """The part of the piece's table that says how much is moved."""
        return self.rows[PIECE.staging, self.emptied]

    def run(self) -> None:
        """All that the device can do."""
        for _ in range(200):
            self.pump.some()

    def arrive(self) -> None:
        begins = PIECE.staging * PIECE.length
        self.window.tensor[begins : begins + PIECE.length] = SENT
        self.there.complete = True

    def moved(self) -> list[MovedPiece]:
        data = np.full(PIECE.length, SENT, dtype=np.uint8).data
        right = PieceChecksum(PIECE.length).of(data, PIECE.transfer, PIECE.group, PIECE.ordinal, PIECE.offset)
        return self.scatter.moved(lambda piece: right)

    def written(self) -> list[int]:
        """Blocks that are no more what they were."""
        return [n for n in range(BLOCKS) if any(bool((pool[n] != UNTOUCHED).any()) for pool in self.pools)]


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def scatter(request: pytest.FixtureRequest) -> Scatter:
    return Scatter(request.param)


def test_a_kernel_starts_when_its_bytes_arrive_without_a_poll(scatter: Scatter) -> None:
    assert scatter.written() == []
    scatter.arrive()
    scatter.run()
    assert scatter.written() == sorted(PLACES)
    assert all(bool((pool[n] == SENT).all()) for pool in scatter.pools for n in PLACES)
    assert scatter.moved() == [], "the link has not reported yet that they arrived"
    scatter.scatter.start(1)
    assert scatter.moved() == [MovedPiece(PIECE, len(PLACES), Outcome.VALID)]


def test_cancelled_before_its_bytes_arrive_a_piece_writes_nothing(scatter: Scatter) -> None:
    scatter.pump.stands = True  # nothing is waited for
    scatter.scatter.cancel(PIECE.transfer)
    scatter.pump.stands = False
    scatter.arrive()
    scatter.run()
    scatter.scatter.start(1)
    assert [moved.outcome for moved in scatter.moved()] == [Outcome.DROPPED]
    assert scatter.written() == []


def test_cancelled_after_its_bytes_arrived_a_piece_is_waited_for(scatter: Scatter) -> None:
    """The scatter may be running, which is unknown: then it is waited for."""
    end = scatter.device.streams[0].record_event()  # that of the announced piece's kernel
    scatter.pump.stands = True
    scatter.arrive()
    assert not end.query()
    scatter.scatter.cancel(PIECE.transfer)
    assert end.query()
    written = scatter.written()
    for pool in scatter.pools:
        pool[:] = UNTOUCHED  # another's
    scatter.pump.stands = False
    scatter.run()
    assert scatter.written() == []
    assert set(written) <= set(PLACES)
    scatter.scatter.start(1)
    assert [moved.outcome for moved in scatter.moved()] == [Outcome.DROPPED]


def test_rows_are_cleared_before_the_arrival_is_queried(scatter: Scatter) -> None:
    """Else it may begin in between, with all of them."""
    found: list[bool] = []
    scatter.there.look = lambda: found.append(bool(scatter.lengths.any()))
    scatter.pump.stands = True
    scatter.scatter.cancel(PIECE.transfer)
    assert found == [False]


def test_arrived_pieces_are_moved_when_a_link_breaks(scatter: Scatter) -> None:
    scatter.pump.stands = True
    scatter.arrive()
    scatter.scatter.start(1)
    assert scatter.written() == []
    assert scatter.scatter.break_off() == []
    assert scatter.written() == sorted(PLACES)
    assert [moved.outcome for moved in scatter.moved()] == [Outcome.VALID]


def test_a_broken_scatter_is_kept_alive_while_kernels_wait(scatter: Scatter) -> None:
    scatter.scatter.break_off()
    kept = weakref.ref(scatter.scatter)
    del scatter.scatter
    gc.collect()
    broken_off = kept()
    assert broken_off is not None
    scatter.there.complete = True
    broken_off.release()
    del broken_off
    gc.collect()
    assert kept() is None


def test_a_broken_scatter_does_not_wait_for_bytes_and_writes_none(scatter: Scatter) -> None:
    assert scatter.scatter.break_off() == [PIECE]
    scatter.arrive()  # what ends a receive that is broken off
    scatter.pump.stands = True
    assert not scatter.pump.idle()
    scatter.scatter.release()
    assert scatter.pump.idle(), "it reads the window, which is freed then"
    assert scatter.written() == []


def test_a_row_is_never_partly_overwritten(scatter: Scatter) -> None:
    """A kernel may read rows while they are emptied: only lengths change, so it writes its own blocks."""
    before = scatter.rows.clone()
    scatter.scatter.cancel(PIECE.transfer)
    changed = (scatter.rows != before).nonzero().tolist()
    assert changed == [[PIECE.staging, word] for word in scatter.emptied]
    assert not scatter.lengths.any()
