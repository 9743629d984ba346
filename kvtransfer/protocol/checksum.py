"""The checksum every piece carries, over its bytes and over its place.

    words   w[0..n)   the piece as little-endian 32-bit words, the last one padded with zero bytes
    odd     m[i]    = (splitmix64(i mod 4096) | 1) * (splitmix64(2^32 + i div 4096) | 1)    mod 2^64
    place   a       = 0, then a = splitmix64(a ^ field) for each of transfer, group, ordinal, offset, length
    sum             = (a + w[0] * m[0] + ... + w[n-1] * m[n-1])  mod 2^64

    splitmix64(x):  z = x + 0x9E3779B97F4A7C15
                    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                    z ^ (z >> 31)                                     all mod 2^64

A change of a single word is always detected: it adds d * m[i] with 0 < |d| < 2^32, and an odd
m[i] is invertible mod 2^64, so the product is not 0. The same holds for the place: splitmix64 is a
bijection, so two places that differ in one field never have the same `a`. Any other change goes
undetected with a probability of about 2^-60 (the checksum guards against faults; tickets guard against
forgery). Padding is unambiguous, since the length is part of the place. A sum of independent products suits
numpy, and a GPU kernel may add the products in any order. There a tile's first factors stay in registers and
its second factor is shared, so a word costs one multiplication.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
# Words of a tile have their own first factors and share one second factor.
TILE_WORDS = 4096
TILE_SEED = 1 << 32
_WORD_BYTES, _PAIR_BYTES = 4, 8
_TILE_PAIRS = TILE_WORDS // 2
_TILES_AT_ONCE = 16


def splitmix64(x: int) -> int:
    """One step of the splitmix64 mixer, a bijection of 64-bit integers."""
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def multipliers(count: int) -> NDArray[np.uint64]:
    """Multipliers m[0..count) of a piece's words, shape `(count,)`, uint64."""
    within, tiles = _factors(count)
    return np.multiply.outer(tiles, within).reshape(-1)[:count]


def _factors(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The first factors of one tile, and the second factors of as many tiles as hold `count` words."""
    tiles = np.arange(-(-count // TILE_WORDS), dtype=np.uint64) + np.uint64(TILE_SEED)
    return _odd(np.arange(TILE_WORDS, dtype=np.uint64)), _odd(tiles)


def _odd(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Computes the odd numbers splitmix64(x) | 1."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def place_sum(transfer: int, group: int, ordinal: int, offset: int, length: int) -> int:
    """Computes `a` of the formula, in [0, 2^64)."""
    mixed = _begun(transfer, group)
    for field in (ordinal, offset, length):
        mixed = splitmix64(mixed ^ field)
    return mixed


@lru_cache(maxsize=1024)
def _begun(transfer: int, group: int) -> int:
    """The common prefix of the place sums of a transfer's group."""
    return splitmix64(splitmix64(transfer) ^ group)


class PieceChecksum:
    """Computes the checksum of pieces of at most `piece_bytes` bytes. Owned by one thread.

    Words are read in pairs W = w[2i] + w[2i+1] * 2^32, without widening each:

        w[2i] * m[2i] + w[2i+1] * m[2i+1]  =  W * m[2i] + (W >> 32) * (m[2i+1] - m[2i] * 2^32)   mod 2^64

    First factors are applied to a few tiles at a time, then each tile's sum is multiplied by its second
    factor, so that the working set stays in the L1 and L2 caches.
    """

    def __init__(self, piece_bytes: int) -> None:
        within, self._of_tile = _factors(-(-piece_bytes // _WORD_BYTES))
        self._of_pair = within[0::2].copy()
        self._of_upper = within[1::2] - (self._of_pair << np.uint64(32))
        self._scratch = np.empty((_TILES_AT_ONCE, _TILE_PAIRS), dtype=np.uint64)

    def of(self, data: memoryview, transfer: int, group: int, ordinal: int, offset: int) -> int:
        """Checksum of `data` (contiguous bytes) at this place, in [0, 2^64)."""
        length = data.nbytes
        total = place_sum(transfer, group, ordinal, offset, length)
        pairs = np.frombuffer(data, dtype="<u8", count=length // _PAIR_BYTES)
        tiles = len(pairs) // _TILE_PAIRS
        whole = pairs[: tiles * _TILE_PAIRS].reshape(tiles, _TILE_PAIRS)
        for start in range(0, tiles, _TILES_AT_ONCE):
            total += self._tiles(whole[start : start + _TILES_AT_ONCE], start)
        if rest := length - whole.nbytes:
            last = np.zeros((1, _TILE_PAIRS * _PAIR_BYTES), dtype=np.uint8)
            last[0, :rest] = np.frombuffer(data, dtype=np.uint8)[-rest:]
            total += self._tiles(last.view("<u8"), tiles)
        return total & _MASK

    def _tiles(self, pairs: NDArray[np.uint64], first: int) -> int:
        """The sum of consecutive tiles, pairs [n, _TILE_PAIRS]."""
        upper = np.right_shift(pairs, 32, out=self._scratch[: len(pairs)])
        sums = np.einsum("tp,p->t", pairs, self._of_pair)
        sums += np.einsum("tp,p->t", upper, self._of_upper)
        return int(np.einsum("t,t", sums, self._of_tile[first : first + len(pairs)]))
