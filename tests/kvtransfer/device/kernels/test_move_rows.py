"""Rows of one piece, moved or only read, whose sum is left in parts: by reference and kernel, against plain
indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtransfer.device.kernels.move_plan import SUM_PARTS
from kvtransfer.device.piece_memory import PieceSums
from kvtransfer.device.reference import move_rows
from kvtransfer.protocol.checksum import PieceChecksum, place_sum
from tests.kvtransfer.support.kernels import DEVICE, KERNEL

BEGINS = -(1 << 61)
PLACES = [(4096, 0, 1500), (100, 2048, 2048), (0, 5000, 3)]  # from, to, length: in words
ALIGNED = [(4096, 0, 1500), (100, 2048, 2048), (8, 5000, 4)]


def moved(
    how: str, source: Tensor, destination: Tensor | None, rows: Tensor, longest: int, *, aligned: bool
) -> tuple[Tensor | None, int]:
    """The destination afterwards, and the sum that the parts have."""
    parts = torch.full((SUM_PARTS,), -9, dtype=torch.int64)
    if how == "reference":
        there = None if destination is None else destination.clone()
        move_rows(source, there, rows, longest, parts, aligned=aligned)
    else:
        from kvtransfer.device.kernels.move_runs import move_piece

        there = None if destination is None else destination.to(DEVICE)
        if DEVICE == "cuda":
            parts = parts.pin_memory()
        move_piece(source.to(DEVICE), there, rows.to(DEVICE), longest, parts, aligned=aligned)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    sums = PieceSums(parts.numpy().view(np.uint64)[None], 0)
    return None if there is None else there.cpu(), (sums.of(0) - BEGINS) % (1 << 64)


def words_sum(words: Tensor) -> int:
    whole = PieceChecksum(4 * len(words)).of(memoryview(words.numpy().tobytes()), 0, 0, 0, 0)
    return (whole - place_sum(0, 0, 0, 0, 4 * len(words))) % (1 << 64)


def random_words(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("words", [4097, 2 * 4096, 3 * 4096 - 4])
@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_rows_of_one_piece(how: str, words: int, stores: bool) -> None:
    """The piece is moved as `RowMover` enqueues it: each row continues the previous one, at any offset in a
    tile."""
    rows = 3
    source = random_words(rows * words, words)
    table = torch.tensor([(n * words, (rows - 1 - n) * words, words, BEGINS, n * words) for n in range(rows)])
    destination = torch.zeros_like(source) if stores else None
    there, found = moved(how, source, destination, table, words, aligned=words % 4 == 0)
    assert found == words_sum(source)
    if there is not None:
        assert torch.equal(there.view(rows, words), source.view(rows, words).flip(0))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_moved_and_summed(how: str, aligned: bool) -> None:
    """Rows that lie anywhere, of any length; nothing beside them is written."""
    places = ALIGNED if aligned else PLACES
    source = random_words(8192, 3)
    at, rows = 0, []
    for place in places:
        rows.append((*place, BEGINS, at))
        at += place[2]
    there, found = moved(how, source, torch.zeros_like(source), torch.tensor(rows), 2048, aligned=aligned)
    wanted = torch.zeros_like(source)
    for origin, goes_to, length in places:
        wanted[goes_to : goes_to + length] = source[origin : origin + length]
    assert there is not None
    assert torch.equal(there, wanted)
    assert found == words_sum(torch.cat([source[origin : origin + length] for origin, _, length in places]))


@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_as_many_rows_as_parts(how: str) -> None:
    """Each program has one of its own."""
    source = random_words(SUM_PARTS * 16, 5)
    table = torch.tensor([(16 * n, 0, 16, BEGINS, 16 * n) for n in range(SUM_PARTS)])
    _, found = moved(how, source, None, table, 16, aligned=True)
    assert found == words_sum(source)


@pytest.mark.parametrize("how", [KERNEL])
def test_a_pieces_header_is_copied(how: str) -> None:
    """Behind the parts that were found, whatever the programs are."""
    from kvtransfer.device.kernels.move_runs import move_piece

    words, begins = 3 * 4096, 2 * SUM_PARTS
    source = random_words(begins + words, 7)
    rows = torch.tensor(
        [(begins, 0, words // 2, BEGINS, 0), (begins + words // 2, words // 2, words // 2, 0, words // 2)]
    )
    parts, there = torch.full((2 * SUM_PARTS,), -9, dtype=torch.int64), torch.zeros(words, dtype=torch.int32)
    if DEVICE == "cuda":
        rows, parts = rows.pin_memory(), parts.pin_memory()
    there = there.to(DEVICE)
    move_piece(source.to(DEVICE), there, rows, words // 2, parts, aligned=True, head=True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    sums = PieceSums(parts.numpy().view(np.uint64)[None], 0)
    assert torch.equal(there.cpu(), source[begins:])
    assert (sums.of(0) - BEGINS) % (1 << 64) == words_sum(source[begins:])
    assert torch.equal(sums.reported_parts(0), source[:begins].view(torch.int64))
    assert sums.reported(0) == sum(source[:begins].view(torch.int64).tolist()) % (1 << 64)
