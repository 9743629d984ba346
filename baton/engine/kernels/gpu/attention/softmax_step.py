"""One tile of keys more in a running softmax: what attention kernels do between one tile and the next."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_step(scores, v, highest, total, attn_out):
    """Adds a tile of scores [queries, keys] and values [keys, dim] → highest, total, attn_out with them.

    Scores are in powers of two, -inf where a row does not see a key. `highest` [queries]: the highest so far,
    -inf at first; `total` and `attn_out`: the sums of 2^(score - highest), and of values so weighted.
    """
    higher, fade, weights = softmax_weights(scores, highest)
    total = total * fade + tl.sum(weights, 1)
    attn_out = attn_out * fade[:, None]
    attn_out = tl.dot(weights.to(v.dtype), v, attn_out, input_precision="ieee")
    return higher, total, attn_out


@triton.jit
def softmax_weights(scores, highest):
    """Weighs a tile's scores → the highest scores of rows so far, the factor for sums so far, and the tile's
    weights."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    # A tile may show a row nothing: then nothing is added.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(highest - base), tl.exp2(scores - base[:, None])
