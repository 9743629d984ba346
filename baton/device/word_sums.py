"""Parts of kernels that move words and sum them with a weight for each place (`kvtransfer.protocol.checksum`
has the formula)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def splitmix64(x):
    """One step of the splitmix64 mixer, of uint64."""
    z = x + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def inside_run(tile, lane, place, length):
    """The offsets of a tile's words in their run of `length` words, which begins at word `place` of a piece,
    and the mask of those inside it."""
    at = lane + tile * (lane.shape[0] * lane.shape[1]) - place
    return at, (at >= 0) & (at < length)


@triton.jit
def tile_sum(words, inside, within, tile, TILE_SEED: tl.constexpr):
    """The weighted sums of a tile's words by its columns: uint64 [ACROSS]. `within`: the first factors of
    their weights."""
    summed = tl.where(inside, words, 0)
    products = summed.to(tl.uint32, bitcast=True).to(tl.uint64) * within
    of_tile = splitmix64(tl.full((), TILE_SEED, tl.uint64) + tile) | 1
    return tl.sum(products, axis=0) * of_tile
