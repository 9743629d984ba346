"""Moves of one piece, by reference and kernel: its sum is the wire's own checksum, and tells every damage."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvtransfer.device.kernels.move_plan import SUM_PARTS
from kvtransfer.device.reference import move_rows, words_of
from kvtransfer.protocol.checksum import PieceChecksum, place_sum
from tests.kvtransfer.support.kernels import DEVICE, KERNEL

BYTES = 20_000
# Of a transfer, group, ordinal, offset and length.
PLACE = 77, 1, 3, 8192, BYTES


def random_bytes(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def moved(how: str, source: Tensor, destination: Tensor, block: int) -> int:
    """The checksum of a piece that fills `source` and is moved to one of the blocks of `destination`, which
    changes in place; by the reference or by the kernel."""
    words = source.numel() // 4
    initial = place_sum(*PLACE[:-1], source.numel())
    row = (0, block * words, words, initial - (1 << 64) if initial >> 63 else initial, 0)
    rows, parts = torch.tensor([row]), torch.full((SUM_PARTS,), -9, dtype=torch.int64)
    if how == "reference":
        move_rows(words_of(source), words_of(destination), rows, words, parts, aligned=True)
    else:
        from kvtransfer.device.kernels.move_runs import move_piece

        there = destination.to(DEVICE)
        if DEVICE == "cuda":
            rows, parts = rows.pin_memory(), parts.pin_memory()
        move_piece(words_of(source.to(DEVICE)), words_of(there), rows, words, parts, aligned=True)
        destination.copy_(there)  # synchronizes
    total: int = sum(parts.tolist()) % (1 << 64)
    return total


@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_a_moved_piece_has_the_wires_own_checksum(how: str) -> None:
    piece, pool = random_bytes(BYTES, seed=1), random_bytes(3, BYTES, seed=2)
    kept = pool.clone()
    found = moved(how, piece, pool, block=1)
    assert found == PieceChecksum(BYTES).of(piece.numpy().data, *PLACE[:-1])
    assert torch.equal(pool[1], piece)
    assert torch.equal(pool[[0, 2]], kept[[0, 2]])


@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_every_kind_of_damage_is_seen(how: str) -> None:
    """One bit, two words that changed places."""
    piece, pool = random_bytes(256, seed=5), torch.zeros(1, 256, dtype=torch.uint8)
    right = moved(how, piece, pool, 0)
    for bit in random.Random(6).sample(range(256 * 8), 6):
        piece[bit // 8] ^= 1 << bit % 8
        assert moved(how, piece, pool, 0) != right
        piece[bit // 8] ^= 1 << bit % 8
    words = piece.view(torch.int32)
    words[[3, 40]] = words[[40, 3]]
    assert moved(how, piece, pool, 0) != right
    words[[3, 40]] = words[[40, 3]]
    assert moved(how, piece, pool, 0) == right


def test_sizes_that_are_no_words() -> None:
    with pytest.raises(ValueError, match="cannot be moved"):
        words_of(torch.zeros(3, dtype=torch.uint8))
