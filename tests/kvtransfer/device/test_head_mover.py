"""Pieces of blocks whose heads several devices have: in staging, and in sums, those of one device."""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.device.heads.moves import HeadMoves
from baton.device.streams.link_device import Kernel
from baton.model_spec.head_runs import head_runs
from baton.model_spec.layout import FP8, CacheGroup, key_value_planes
from kvtransfer.device.blocks import DividedBlocks
from kvtransfer.device.kernels.move_plan import SUM_PARTS
from kvtransfer.device.mover import NOTHING, host_sums
from kvtransfer.device.movers import gatherer, scatterer
from kvtransfer.device.piece_memory import OpenedWindow, PieceMemory
from kvtransfer.protocol.checksum import TILE_SEED, PieceChecksum, place_sum
from kvtransfer.protocol.frames import Piece
from tests.kvtransfer.support.fake_device import FakeDevice, FakeStream, Pump
from tests.kvtransfer.support.kernels import DEVICE, KERNEL

if TYPE_CHECKING:
    from baton.device.heads.kernel import HeadMove

HEADS, BLOCKS, TOKENS = 4, 6, 4
WINDOW = 3
STALE = 0x5A
# Several blocks, one block, and parts of one.
CUTS = ["several", "one", "parts"]
# Codes of 48 dimensions have padding behind the scales; heads of 5 dimensions are no multiples of 16 bytes.
CASES = [("float32", 8, 2), ("bfloat16", 5, 4), (FP8, 48, 4), (FP8, 16, 2)]

IN_INTERPRETER = pytest.mark.skipif(
    DEVICE == "cuda", reason="Triton's interpreter is used where there is no GPU"
)


def group_of(dtype: str, heads: int, dim: int) -> CacheGroup:
    return CacheGroup((0, 2, 3), key_value_planes(dtype, heads, dim), TOKENS, window=8)


class Divided:
    """A pool of whole blocks, random with zeros as padding, and its parts on `count` devices."""

    def __init__(self, dtype: str, dim: int, count: int, seed: int) -> None:
        self.group, part = group_of(dtype, HEADS, dim), group_of(dtype, HEADS // count, dim)
        generator = torch.Generator().manual_seed(seed)
        self.whole = torch.zeros(BLOCKS, self.group.block_bytes, dtype=torch.uint8)
        self.parts = [torch.zeros(BLOCKS, part.block_bytes, dtype=torch.uint8) for _ in range(count)]
        each = HEADS // count
        for layer, ((plane, offset), (mine, my_offset)) in itertools.product(
            range(len(self.group.layers)),
            zip(self.group.plane_offsets(), part.plane_offsets(), strict=True),
        ):
            head = plane.row_bytes * TOKENS
            data = torch.randint(1, 256, (BLOCKS, HEADS, head), dtype=torch.uint8, generator=generator)
            begins = layer * self.group.layer_bytes + offset
            self.whole[:, begins : begins + HEADS * head] = data.flatten(1)
            for rank, pool in enumerate(self.parts):
                begins = layer * part.layer_bytes + my_offset
                pool[:, begins : begins + mine.heads * head] = data[
                    :, rank * each : (rank + 1) * each
                ].flatten(1)

    def heads(self, device: str = "cpu") -> HeadMoves:
        self.parts = [part.to(device) for part in self.parts]
        return HeadMoves(self.group, self.parts)


def pieces_of(cut: str, size: int) -> list[tuple[Piece, list[int]]]:
    """Pieces of a transfer, and the blocks of each. Parts are of a third of a block, whole lines."""
    if cut == "several":
        return [(Piece(7, 0, 0, 0, 3 * size, 1, 0), [4, 1, 5]), (Piece(7, 0, 3, 0, size, 2, 0), [2])]
    if cut == "one":
        return [(Piece(7, 0, 0, 0, size, 2, 0), [3])]
    third = size // 48 * 16
    places = [(0, third), (third, third), (2 * third, third), (3 * third, size - 3 * third)]
    return [
        (Piece(7, 0, 0, at, length, n % WINDOW, 0), [3]) for n, (at, length) in enumerate(places) if length
    ]


def place_of(piece: Piece) -> int:
    return place_sum(piece.transfer, piece.group, piece.ordinal, piece.offset, piece.length)


def checksum_of(piece: Piece, data: Tensor) -> int:
    checksum = PieceChecksum(piece.length)
    return checksum.of(data.numpy().data, piece.transfer, piece.group, piece.ordinal, piece.offset)


def bytes_of(whole: Tensor, piece: Piece, blocks: list[int]) -> Tensor:
    length = min(whole.shape[1], piece.length)
    return whole[blocks, piece.offset : piece.offset + length].flatten()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("dtype", "dim", "count"), CASES)
def test_gathered_pieces_are_those_of_one_device(dtype: str, dim: int, count: int, cut: str) -> None:
    divided, device = Divided(dtype, dim, count, seed=1), FakeDevice(Pump(None))
    size = divided.group.block_bytes
    most = 3 * size
    window = PieceMemory(device, WINDOW, most, heads=True)
    opened = torch.full((WINDOW * most,), STALE, dtype=torch.uint8)
    blocks = DividedBlocks(device, [divided.heads()])
    sums = host_sums(device, WINDOW)
    movers = [
        gatherer(blocks, WINDOW, most, window, window),
        gatherer(blocks, WINDOW, most, sums, OpenedWindow(opened.data_ptr(), WINDOW, most)),
    ]
    stream = device.stream()
    for piece, numbers in pieces_of(cut, size):
        window.tensor[:] = STALE
        for mover in movers:
            mover.move(stream, mover.prepare(piece, numbers, place_of(piece)))
        wanted = bytes_of(divided.whole, piece, numbers)
        assert window.sum_of(piece.staging) == sums.of(piece.staging) == checksum_of(piece, wanted)
        for found, at in ((window.tensor, piece.staging * window.stride), (opened, piece.staging * most)):
            assert torch.equal(found[at : at + piece.length], wanted)
            assert bool((found[at + piece.length : at + most] == STALE).all())


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("dtype", "dim", "count"), CASES)
def test_scattered_pieces_reach_the_devices_of_their_heads(
    dtype: str, dim: int, count: int, cut: str, header: bool
) -> None:
    sent, divided = Divided(dtype, dim, count, seed=2), Divided(dtype, dim, count, seed=3)
    device, size = FakeDevice(Pump(None)), divided.group.block_bytes
    before = [part.clone() for part in divided.parts]
    window = PieceMemory(device, WINDOW, 3 * size, heads=header)
    sums = host_sums(device, WINDOW, heads=header)
    mover, stream = (
        scatterer(DividedBlocks(device, [divided.heads()]), WINDOW, 3 * size, sums, window),
        device.stream(),
    )
    mover.move(stream, NOTHING)
    touched = set()
    for piece, numbers in pieces_of(cut, size):
        data = bytes_of(sent.whole, piece, numbers)
        at = piece.staging * window.stride
        window.tensor[at : at + piece.length] = data
        if header:
            window.parts(piece.staging)[:] = 3
        mover.move(stream, mover.prepare(piece, numbers, place_of(piece)))
        assert sums.of(piece.staging) == checksum_of(piece, data)
        assert not header or sums.reported(piece.staging) == 3 * SUM_PARTS
        touched |= set(numbers)
    for part, theirs, old in zip(divided.parts, sent.parts, before, strict=True):
        for block in range(BLOCKS):
            assert torch.equal(part[block], (theirs if block in touched else old)[block])


def test_every_damaged_word_is_seen() -> None:
    """Damage to padding is seen too, although padding is written nowhere."""
    divided, device = Divided(FP8, 48, 2, seed=7), FakeDevice(Pump(None))
    size = divided.group.block_bytes
    window, sums = PieceMemory(device, WINDOW, size), host_sums(device, WINDOW)
    mover = scatterer(DividedBlocks(device, [divided.heads()]), WINDOW, size, sums, window)
    stream, piece = device.stream(), Piece(7, 0, 0, 0, size, 1, 0)
    data = divided.whole[3].clone()
    right = checksum_of(piece, data)
    at, draw = piece.staging * window.stride, random.Random(8)
    (padding, *_) = (run for run in head_runs(divided.group, 2) if run.rank is None)
    for byte in (*draw.sample(range(size), 8), padding.whole, padding.whole + padding.length - 1):
        window.tensor[at : at + size] = data
        window.tensor[at + byte] ^= 1 << draw.randrange(8)
        mover.move(stream, mover.prepare(piece, [2], place_of(piece)))
        assert sums.of(piece.staging) != right
    window.tensor[at : at + size] = data
    mover.move(stream, mover.prepare(piece, [2], place_of(piece)))
    assert sums.of(piece.staging) == right


def test_a_cleared_table_moves_nothing() -> None:
    divided, pump = Divided("float32", 8, 2, seed=4), Pump(1)
    device, size = FakeDevice(pump), divided.group.block_bytes
    before = [part.clone() for part in divided.parts]
    window, sums = PieceMemory(device, WINDOW, size), host_sums(device, WINDOW)
    mover, stream = (
        scatterer(DividedBlocks(device, [divided.heads()]), WINDOW, size, sums, window),
        device.stream(),
    )
    prepared = mover.prepare(Piece(7, 0, 0, 0, size, 1, 0), [2], 0)
    mover.move(stream, prepared)
    mover.clear(prepared)
    stream.synchronize()
    assert all(map(torch.equal, divided.parts, before))


# Elements that are no whole words, and such as are; pieces and the programs that move them; both directions.
MOVED = [
    *itertools.product(
        [("bfloat16", 5, 4), (FP8, 48, 2), (FP8, 48, 4)],
        [("several", (5, 1)), ("one", (1, 1)), ("parts", (2, 3))],
        [True, False],
    )
]


@pytest.mark.parametrize(
    ("kind", "cut", "gathers"),
    [
        case if n in (0, 5, 8, 7) else pytest.param(*case, marks=pytest.mark.slow)
        for n, case in enumerate(MOVED)
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [KERNEL])
def test_the_kernel_does_as_the_reference(
    how: str, kind: tuple[str, int, int], cut: tuple[str, tuple[int, int]], gathers: bool
) -> None:
    from baton.device.heads.kernel import HeadMove, move_heads
    from baton.device.heads.table import table_words, write_table

    (dtype, dim, count), (pieces, grid) = kind, cut
    divided, sent = Divided(dtype, dim, count, seed=5), Divided(dtype, dim, count, seed=6)
    group = divided.group
    other = Divided(dtype, dim, count, seed=5)
    one, two = divided.heads(), other.heads(DEVICE)
    for piece, numbers in pieces_of(pieces, group.block_bytes):
        words = range(piece.offset // 4, (piece.offset + min(group.block_bytes, piece.length)) // 4)
        places = range(8, 8 + len(numbers) * len(words), len(words))
        table = torch.zeros(table_words(4), dtype=torch.int64)
        write_table(table.numpy().data.cast("B"), 0, numbers, words, places, len(one.runs), place_of(piece))
        whole = torch.full((piece.length // 4 + 16,), 99, dtype=torch.int32)
        if not gathers:
            whole[8:-8] = bytes_of(sent.whole, piece, numbers).view(torch.int32)
        aligned = one.aligned(4 * words.start, 4 * words.stop)
        assert aligned == (dim != 5)
        if DEVICE == "cuda":
            table = table.pin_memory()
        theirs, sums = whole.to(DEVICE, copy=True), torch.full((SUM_PARTS,), 7, dtype=torch.int64)
        sums = sums.pin_memory() if DEVICE == "cuda" else sums
        move = HeadMove(aligned, gathers, SUM_PARTS, TILE_SEED)
        move_heads(move, grid, two.pool, theirs, table, two.runs, sums)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        mine = whole.clone()
        one.move(mine, table, gathers=gathers)
        assert torch.equal(theirs.cpu(), mine)
        found = int(np.add.reduce(sums.numpy().view(np.uint64)))
        assert found == checksum_of(piece, mine[8:-8].view(torch.uint8))
        if not gathers:
            for mine, theirs in zip(divided.parts, other.parts, strict=True):
                assert torch.equal(mine, theirs.cpu())


def tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    """An element of memory of this process; kernels in Triton's interpreter reach what is around it."""
    memory = (ctypes.c_uint8 * dtype.itemsize).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(dtype)


class LaunchingStream(FakeStream):
    """Runs kernels in Triton's interpreter, by the addresses that a GPU would be given."""

    def __init__(self, move: HeadMove) -> None:
        super().__init__(Pump(None))
        self._move = move
        self.grids: list[tuple[int, int]] = []

    def launch(self, kernel: Kernel, grid: tuple[int, int], addresses: tuple[int, ...]) -> None:
        from baton.device.heads.kernel import move_heads

        self.grids.append(grid)
        pool, whole = (tensor_at(address, torch.int32) for address in addresses[:2])
        table, runs, sums = (tensor_at(address, torch.int64) for address in addresses[2:])
        move_heads(self._move, grid, pool, whole, table, runs, sums)


@IN_INTERPRETER
@pytest.mark.parametrize("gathers", [True, False])
def test_a_gpus_kernel_is_given_the_addresses_of_a_piece(
    monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    """The addresses are those of the piece's checksum and, on arrival, of its sender's, which lies before the
    piece."""
    from baton.device.heads.kernel import HeadMove

    made: list[tuple[bool, ...]] = []

    def link_kernel(device: torch.device, *variant: bool) -> Kernel:
        made.append(variant)
        return Kernel(0, 0, 0)

    monkeypatch.setattr("kvtransfer.device.head_mover.link_kernel", link_kernel)
    divided, sent = (Divided(FP8, 48, 2, seed=seed) for seed in (9, 10))
    device, size = FakeDevice(Pump(None)), divided.group.block_bytes
    device.tensors_on = torch.device("cuda", 0)
    window = PieceMemory(device, WINDOW, 2 * size, heads=True)
    window.tensor[:] = STALE
    blocks, sums = DividedBlocks(device, [divided.heads()]), host_sums(device, WINDOW, heads=True)
    stream = LaunchingStream(HeadMove(True, gathers, SUM_PARTS, TILE_SEED, not gathers))
    if gathers:
        mover = gatherer(blocks, WINDOW, 2 * size, window, window)
    else:
        mover = scatterer(blocks, WINDOW, 2 * size, sums, window)
    assert made == [(True, gathers, not gathers)]
    piece, numbers = Piece(7, 0, 1, 0, 2 * size, 2, 0), [4, 1]
    at = piece.staging * window.stride
    if not gathers:
        window.tensor[at : at + piece.length] = bytes_of(sent.whole, piece, numbers)
        window.parts(piece.staging)[:] = 3
        mover.move(stream, NOTHING)
    mover.move(stream, mover.prepare(piece, numbers, place_of(piece)), beside_steps=not gathers)
    found = window.tensor[at : at + piece.length]
    if gathers:
        assert torch.equal(found, bytes_of(divided.whole, piece, numbers))
        assert window.sum_of(piece.staging) == checksum_of(piece, found)
        assert stream.grids == [(2 * len(head_runs(divided.group, 2)), 1)]
    else:
        assert sums.of(piece.staging) == checksum_of(piece, found)
        assert sums.reported(piece.staging) == 3 * SUM_PARTS
        for part, theirs in zip(divided.parts, sent.parts, strict=True):
            assert torch.equal(part[numbers], theirs[numbers])
        assert stream.grids == [(1, 1), (24, 1)]


@IN_INTERPRETER
@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize("gathers", [True, False])
def test_a_gpus_kernel_moves_what_a_queue_enqueues(
    monkeypatch: pytest.MonkeyPatch, gathers: bool, directly: bool
) -> None:
    """The kernel is launched by Triton's launcher, and without it."""
    from baton.device.heads import launch
    from baton.device.heads.kernel import HeadMove, move_heads
    from baton.device.heads.table import table_words, write_table

    class Runtime:
        def launch(
            self, _function: int, grid: tuple[int, int], _threads: int, _shared: int, stream: int,
            addresses: tuple[int, ...],
        ) -> None:  # fmt: skip
            assert stream == 5
            pool, whole = (tensor_at(address, torch.int32) for address in addresses[:2])
            table, runs, sums = (tensor_at(address, torch.int64) for address in addresses[2:])
            move_heads(HeadMove(True, gathers), grid, pool, whole, table, runs, sums)

    monkeypatch.setattr(launch, "cuda_runtime", Runtime)
    monkeypatch.setattr(launch, "prepared_heads", lambda *_: Kernel(0, 0, 0) if directly else None)
    divided, sent = (Divided(FP8, 48, 2, seed=seed) for seed in (11, 12))
    heads, numbers = divided.heads(), [5, 2]
    words, table = range(heads.words), torch.zeros(table_words(2), dtype=torch.int64)
    write_table(table.numpy().data.cast("B"), 0, numbers, words, [0, heads.words], len(heads.runs))
    whole = sent.whole[numbers].flatten()
    launch.launch_heads(heads, whole, table, 2, gathers=gathers, stream=5)
    if gathers:
        assert torch.equal(whole, divided.whole[numbers].flatten())
    else:
        for part, theirs in zip(divided.parts, sent.parts, strict=True):
            assert torch.equal(part[numbers], theirs[numbers])
