"""Gather and scatter, by reference and kernel: against plain indexing and `PieceChecksum`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvtransfer.device.reference import Run, Runs, move, words_of
from kvtransfer.protocol.checksum import PieceChecksum
from tests.kvtransfer.support.kernels import DEVICE, KERNEL
from tests.kvtransfer.support.runs import Place, piece_checksums, reversed_runs, whole_pieces

BLOCKS, BLOCK_BYTES, PIECE_BYTES = 12, 20_000, 8192
CHOSEN = [7, 2, 11, 3]
PIECES = 3 * len(CHOSEN)
STAGING = random.Random(4).sample(range(16), PIECES)


def random_bytes(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def moved(how: str, source: Tensor, destination: Tensor, runs: list[Run]) -> Tensor:
    """The same move by the reference or by the kernel; the destination changes in place."""
    if how == "reference":
        return move(words_of(source), words_of(destination), Runs(runs, "cpu"))
    from kvtransfer.device.kernels.move_runs import move_runs

    there, device_runs = destination.to(DEVICE), Runs(runs, DEVICE)
    sums = torch.zeros(device_runs.pieces, dtype=torch.int64, device=DEVICE)
    move_runs(words_of(source.to(DEVICE)), words_of(there), device_runs.table, device_runs.longest, sums)
    destination.copy_(there)
    return sums.cpu()


def places() -> list[Place]:
    offsets = range(0, BLOCK_BYTES, PIECE_BYTES)
    return [
        Place(77, 1, ordinal, offset, min(PIECE_BYTES, BLOCK_BYTES - offset))
        for ordinal in range(len(CHOSEN))
        for offset in offsets
    ]


@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_there_and_back_with_the_wires_own_checksum(how: str) -> None:
    pool, staging = random_bytes(BLOCKS, BLOCK_BYTES, seed=1), random_bytes(16, PIECE_BYTES, seed=2)
    runs = whole_pieces(CHOSEN, BLOCK_BYTES, PIECE_BYTES, STAGING)
    untouched = staging.clone()
    sums = moved(how, pool, staging, runs)
    checksum = PieceChecksum(PIECE_BYTES)
    expected = []
    for index, place in zip(STAGING, places(), strict=True):
        data = pool[CHOSEN[place.ordinal], place.offset : place.offset + place.length]
        assert torch.equal(staging[index, : place.length], data)
        assert torch.equal(staging[index, place.length :], untouched[index, place.length :])
        view = data.contiguous().numpy().data
        expected.append(checksum.of(view, place.transfer, place.group, place.ordinal, place.offset))
    assert piece_checksums(sums, places()) == expected
    others = set(range(16)) - set(STAGING)
    assert all(torch.equal(staging[index], untouched[index]) for index in others)

    landed = random_bytes(BLOCKS, BLOCK_BYTES, seed=3)
    kept = landed.clone()
    assert torch.equal(moved(how, staging, landed, reversed_runs(runs)), sums)
    for block in range(BLOCKS):
        assert torch.equal(landed[block], pool[block] if block in CHOSEN else kept[block])


@pytest.mark.parametrize("how", ["reference", KERNEL])
def test_every_kind_of_damage_is_seen(how: str) -> None:
    """One bit, two words that changed places, two pieces that did."""
    runs = reversed_runs(whole_pieces([0, 1], 256, 256, [0, 1]))
    staging, pool = random_bytes(2, 256, seed=5), torch.zeros(2, 256, dtype=torch.uint8)
    at = [Place(9, 0, 0, 0, 256), Place(9, 0, 1, 0, 256)]

    def checksums() -> list[int]:
        return piece_checksums(moved(how, staging, pool, runs), at)

    right = checksums()
    dice = random.Random(6)
    for bit in dice.sample(range(256 * 8), 6):
        staging[0, bit // 8] ^= 1 << bit % 8
        assert (checksums()[0] != right[0], checksums()[1] != right[1]) == (True, False)
        staging[0, bit // 8] ^= 1 << bit % 8
    words = staging.view(torch.int32)
    words[0, [3, 40]] = words[0, [40, 3]]
    assert checksums()[0] != right[0]
    words[0, [3, 40]] = words[0, [40, 3]]
    staging[[0, 1]] = staging[[1, 0]]
    swapped = checksums()
    assert swapped[0] != right[0]
    assert swapped[1] != right[1]


def test_sizes_that_are_no_words() -> None:
    with pytest.raises(ValueError, match="not whole words"):
        whole_pieces([0], 10, 8, [0, 1])
    with pytest.raises(ValueError, match="cannot be moved"):
        words_of(torch.zeros(3, dtype=torch.uint8))
