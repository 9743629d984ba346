"""Runs by the row, whose last word is their sum: by reference and kernel, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.checksum import PieceChecksum, place_sum
from kvtransfer.move_plan import ROW_WORDS, Travels
from kvtransfer.moving import move_rows
from tests.kvtransfer.kernels import DEVICE, KERNEL

PLACES = [(4096, 0, 1500), (100, 2048, 2048), (0, 5000, 3)]  # from, to, length: in words
ALIGNED = [(4096, 0, 1500), (100, 2048, 2048), (8, 5000, 4)]


@pytest.mark.parametrize("words", [4097, 2 * 4096, 3 * 4096 - 4])
@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_rows_of_one_piece(how: str, words: int) -> None:
    """As `RowMover` says it: each row goes on where the one before ended, whatever a tile has."""
    device, rows = "cpu" if how == "reference" else DEVICE, 3
    generator = torch.Generator().manual_seed(words)
    source = torch.randint(-(2**31), 2**31 - 1, (rows * words,), dtype=torch.int32, generator=generator)
    table = torch.tensor(
        [(n * words, (rows - 1 - n) * words, words, ROW_WORDS - 1, n * words, 3) for n in range(rows)],
        dtype=torch.int64,
    )
    there, found = torch.zeros_like(source).to(device), table.to(device)
    if how == "reference":
        move_rows(source, there, found, words, Travels.DESTINATION, aligned=False)
    else:
        from kvtransfer.gpu.move_runs import move_runs

        move_runs(
            source.to(device), there, found, words, found.view(-1), convert=False, from_bfloat=False,
            sum_source=False, aligned=words % 4 == 0,
        )  # fmt: skip
    whole = PieceChecksum(4 * rows * words).of(memoryview(source.numpy().tobytes()), 0, 0, 0, 0)
    place = place_sum(0, 0, 0, 0, 4 * rows * words)
    assert (int(found[0, 5]) - 3) % (1 << 64) == (whole - place) % (1 << 64)
    assert torch.equal(there.cpu().view(rows, words), source.view(rows, words).flip(0))


@pytest.mark.parametrize("travels", list(Travels))
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_moved_and_summed(how: str, aligned: bool, travels: Travels) -> None:
    device = "cpu" if how == "reference" else DEVICE
    places = ALIGNED if aligned else PLACES
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(-(2**31), 2**31 - 1, (8192,), dtype=torch.int32, generator=generator)
    begins = [7, -1, 1 << 62]
    rows = torch.tensor(
        [
            (*place, n * ROW_WORDS + 5, 0, first)
            for n, (place, first) in enumerate(zip(places, begins, strict=True))
        ],
        dtype=torch.int64,
    )
    destination = torch.zeros_like(source)
    there, found = destination.to(device), rows.to(device)
    if how == "reference":
        move_rows(source, there, found, 2048, travels, aligned=aligned)
    else:
        from kvtransfer.gpu.move_runs import move_runs

        move_runs(
            source.to(device), there, found, 2048, found.view(-1), convert=False, from_bfloat=False,
            sum_source=travels is Travels.SOURCE, aligned=aligned,
        )  # fmt: skip
    for row, (origin, goes_to, length), first in zip(found.cpu().tolist(), places, begins, strict=True):
        words = source[origin : origin + length]
        destination[goes_to : goes_to + length] = words
        place = place_sum(0, 0, 0, 0, 4 * length)
        whole = PieceChecksum(8192).of(memoryview(words.numpy().tobytes()), 0, 0, 0, 0)
        assert (row[5] - first) % (1 << 64) == (whole - place) % (1 << 64)
    assert torch.equal(there.cpu(), destination)
