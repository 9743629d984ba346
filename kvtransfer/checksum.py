"""The checksum every piece carries, over its bytes and over its place.

    words   w[0..n)   the piece as little-endian 32-bit words, the last one padded with zero bytes
    odd     m[i]    = splitmix64(i) | 1
    place   a       = 0, then a = splitmix64(a ^ field) for each of transfer, group, ordinal, offset, length
    sum             = (a + w[0] * m[0] + ... + w[n-1] * m[n-1])  mod 2^64

    splitmix64(x):  z = x + 0x9E3779B97F4A7C15
                    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                    z ^ (z >> 31)                                     all mod 2^64

Any change of a single word is detected for certain: it adds d * m[i] with 0 < |d| < 2^32, and an odd
m[i] is invertible mod 2^64, so the product is not 0. The same holds for the place: splitmix64 is a
bijection, so two places that differ in one field never have the same `a`. Any other change escapes
with a chance of about 2^-64 (it guards against faults, not against forgers: tickets do that).
Padding is unambiguous, since the length is part of the place. A sum of independent products suits
numpy, and a GPU kernel may add them in any order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
# Words summed at a time: their 64-bit copies stay in the second-level cache.
_CHUNK_WORDS = 32768


def splitmix64(x: int) -> int:
    """One step of the splitmix64 mixer, a bijection of 64-bit integers."""
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def multipliers(count: int) -> NDArray[np.uint64]:
    """m[0..count), shape `(count,)`, uint64."""
    z = np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def place_sum(transfer: int, group: int, ordinal: int, offset: int, length: int) -> int:
    """`a` of the formula."""
    mixed = 0
    for field in (transfer, group, ordinal, offset, length):
        mixed = splitmix64(mixed ^ field)
    return mixed


class PieceChecksum:
    """Computes the checksum of pieces of at most `piece_bytes` bytes. Owned by one thread."""

    def __init__(self, piece_bytes: int) -> None:
        words = -(-piece_bytes // 4)
        self._multipliers = multipliers(words)
        self._scratch = np.empty(min(words, _CHUNK_WORDS), dtype=np.uint64)

    def of(self, data: memoryview, transfer: int, group: int, ordinal: int, offset: int) -> int:
        """Checksum of `data` (contiguous bytes) at this place, in [0, 2^64)."""
        length = data.nbytes
        whole = length // 4
        total = place_sum(transfer, group, ordinal, offset, length)
        words = np.frombuffer(data, dtype="<u4", count=whole)
        for start in range(0, whole, _CHUNK_WORDS):
            chunk = words[start : start + _CHUNK_WORDS]
            wide = self._scratch[: len(chunk)]
            np.copyto(wide, chunk)
            total += int(np.einsum("i,i", wide, self._multipliers[start : start + len(chunk)]))
        if length % 4:
            tail = int.from_bytes(data[whole * 4 :], "little")
            total += tail * int(self._multipliers[whole])
        return total & _MASK
