from __future__ import annotations

import random

import numpy as np
import pytest

from kvtransfer.protocol.checksum import PieceChecksum, multipliers, place_sum, splitmix64

PLACE = (3, 1, 4, 4096)


def plain(data: bytes, transfer: int, group: int, ordinal: int, offset: int) -> int:
    """The formula of the docstring, word by word."""
    total = place_sum(transfer, group, ordinal, offset, len(data))
    padded = data + b"\0" * (-len(data) % 4)
    for i in range(0, len(padded), 4):
        tile, within = divmod(i // 4, 4096)
        odd = (splitmix64(within) | 1) * (splitmix64(2**32 + tile) | 1)
        total += int.from_bytes(padded[i : i + 4], "little") * odd
    return total % 2**64


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 333, 4096, 4 * 32768, 4 * 32768 + 7, 300_001])
def test_equals_the_plain_formula(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8).tobytes()
    assert PieceChecksum(300_004).of(memoryview(data), *PLACE) == plain(data, *PLACE)


def test_known_values() -> None:
    """Pinned, since both ends of a link may be different builds."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert PieceChecksum(64).of(memoryview(b"baton"), 1, 2, 3, 4) == plain(b"baton", 1, 2, 3, 4)
    assert plain(b"baton", 1, 2, 3, 4) == 4956687588288538730


def test_every_multiplier_is_odd() -> None:
    assert bool(np.all(multipliers(100_000) & np.uint64(1)))


def test_every_change_of_one_word_is_seen() -> None:
    rng = random.Random(5)
    checksum = PieceChecksum(1027)
    data = bytearray(rng.randbytes(1027))
    right = checksum.of(memoryview(data), *PLACE)
    for _ in range(2000):
        at = rng.randrange(257) * 4
        before = bytes(data[at : at + 4])
        data[at : at + 4] = rng.randbytes(len(before))
        changed = bytes(data[at : at + 4]) != before
        assert (checksum.of(memoryview(data), *PLACE) != right) == changed
        data[at : at + 4] = before


def test_every_change_of_the_place_is_seen() -> None:
    checksum = PieceChecksum(64)
    data = memoryview(bytes(64))
    places = {(t, g, o, f) for t in (1, 2, 1 << 63) for g in (0, 1) for o in (0, 1, 9) for f in (0, 64, 128)}
    assert len({checksum.of(data, *place) for place in places}) == len(places)


def test_zero_padding_is_not_mistaken_for_data() -> None:
    checksum = PieceChecksum(64)
    sums = {checksum.of(memoryview(bytes(length)), *PLACE) for length in range(1, 33)}
    assert len(sums) == 32


def test_swapped_words_are_seen() -> None:
    checksum = PieceChecksum(64)
    assert checksum.of(memoryview(b"aaaabbbb"), *PLACE) != checksum.of(memoryview(b"bbbbaaaa"), *PLACE)


def test_an_unaligned_view_gives_the_same() -> None:
    data = bytes(range(200))
    checksum = PieceChecksum(200)
    assert checksum.of(memoryview(b"x" + data)[1:], *PLACE) == checksum.of(memoryview(data), *PLACE)
