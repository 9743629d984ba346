"""Rows' heads on their way from the product to attention, in registers: norm, rotation, and new tokens' keys
and values as the paged cache has them."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.engine.kernels.gpu.attention.kv_codes import (
    codes_of,
    packed,
    scales_of,
)


@triton.jit
def _rotated(x, partner, cos, sin, low):
    """(a·cos - b·sin, b·cos + a·sin); `partner` is the other half, `low` marks the first."""
    return x * cos + tl.where(low, -partner, partner) * sin


@triton.jit
def _normed(x, weight, eps, DIM: tl.constexpr, dtype: tl.constexpr, ROUNDS: tl.constexpr, SUM: tl.constexpr):
    """RMSNorm over the last dimension of a 2-D tile; ROUNDS: before the weight multiplies it, too. SUM: dtype
    of the sum of squares."""
    squares = tl.sum((x * x).to(SUM), 1).to(tl.float32)
    scaled = x * tl.rsqrt(squares / DIM + eps)[:, None]
    if ROUNDS:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight).to(dtype).to(tl.float32)


@triton.jit
def load_heads(
    vectors, there, cos, sin, norm, eps,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Loads queries or keys at the pointers `vectors` [N, 1], normed by the weights `norm` and rotated → [N,
    DIM_PADDED] in the product's dtype; zeros for those that are not `there` [N]. cos, sin float32, of all or
    of each."""
    dtype: tl.constexpr = vectors.dtype.element_ty
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PADDED)
    in_dim = d < DIM
    low = d < half
    partner = tl.where(low, d + half, d - half)
    mask = there[:, None] & in_dim[None, :]
    x = tl.load(vectors + d[None, :], mask=mask, other=0.0).to(tl.float32)
    x_partner = tl.load(vectors + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if QK_NORM:
        rounds: tl.constexpr = norm.dtype.element_ty == dtype
        weight = tl.load(norm + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        weight_partner = tl.load(norm + partner, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        x = _normed(x, weight, eps, DIM, dtype, rounds, tl.float32)
        x_partner = _normed(x_partner, weight_partner, eps, DIM, dtype, rounds, tl.float32)
    return _rotated(x, x_partner, cos, sin, low[None, :]).to(dtype)


@triton.jit
def _quantised(x, place, in_dim):
    """Writes the codes of the vector x [1, dim] to the cache → what they stand for, and their scale [1], in
    float32."""
    x = x.to(tl.float32)
    scales = scales_of(tl.max(tl.abs(x), 1))
    codes, numbers = codes_of(x, scales)
    tl.store(place, codes, mask=in_dim[None, :])
    return numbers * scales[:, None], scales


@triton.jit
def write_token(
    row,
    head,
    layer,
    layer_pairs,
    block,
    position,
    block_stride,
    plane_stride,
    pair_block_stride,
    cos,
    sin,
    key_norm,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QK_NORM: tl.constexpr,
    CODES: tl.constexpr,
):
    """Writes the key and value of one token and KV head into the cache → both [1, DIM_PADDED], as the cache
    has them: in its dtype, or in float32 what the codes stand for.

    `row`: the token's row of the product; `layer`, `layer_pairs`: the head's part of the cache and of its
    scales in block 0; `block`: the one that `position` falls into. cos, sin [DIM_PADDED] float32.
    """
    dtype: tl.constexpr = row.dtype.element_ty
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, DIM_PADDED)
    in_dim = d < DIM
    low = d < half
    partner = tl.where(low, d + half, d - half)
    k_row = row + (HEADS + head) * DIM
    k = tl.load(k_row + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    k_partner = tl.load(k_row + partner, mask=in_dim, other=0.0).to(tl.float32)[None, :]
    if QK_NORM:
        rounds: tl.constexpr = key_norm.dtype.element_ty == dtype
        weight = tl.load(key_norm + d, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        weight_partner = tl.load(key_norm + partner, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        # Kernels that spread a vector over threads in other ways have to write the same bits: in float32 the
        # last bit of a sum depends on its order.
        k = _normed(k, weight, eps, DIM, dtype, rounds, tl.float64)
        k_partner = _normed(k_partner, weight_partner, eps, DIM, dtype, rounds, tl.float64)
    k = _rotated(k, k_partner, cos[None, :], sin[None, :], low[None, :]).to(dtype)
    v = tl.load(row + (HEADS + KV_HEADS + head) * DIM + d, mask=in_dim, other=0.0)[None, :]
    places = layer + block * block_stride + (position % BLOCK_TOKENS) * DIM + d[None, :]
    if CODES:
        k, k_scales = _quantised(k, places, in_dim)
        v, v_scales = _quantised(v, places + plane_stride, in_dim)
        pair_place = layer_pairs + block * pair_block_stride + position % BLOCK_TOKENS
        tl.store(pair_place + tl.arange(0, 1), packed(k_scales, v_scales))
    else:
        tl.store(places, k, mask=in_dim[None, :])
        tl.store(places + plane_stride, v, mask=in_dim[None, :])
    return k, v


@triton.jit
def write_tokens(
    rows, position, there, mine, head, layer, layer_pairs, table, block_stride, plane_stride,
    pair_block_stride, cos, sin, key_norm, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, QK_NORM: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Loads keys and values of T tokens of a slot for one KV head, and writes those that are `mine` into the
    cache → both [T, DIM_PADDED], and the scales of both [T]: of codes, which then stand for themselves, in
    float32; else of no meaning. Zeros where a token is not `there`.

    `rows` [T]: pointers to the tokens' rows of the product; position, there, mine [T]; cos, sin [T,
    DIM_PADDED] float32; the rest as in `write_token`.
    """
    d = tl.arange(0, DIM_PADDED)
    in_dim = d < DIM
    known = there[:, None] & in_dim[None, :]
    keys = rows[:, None] + (HEADS + head) * DIM
    k = load_heads(keys, there, cos, sin, key_norm, eps, DIM, DIM_PADDED, QK_NORM)
    v = tl.load(keys + KV_HEADS * DIM + d[None, :], mask=known, other=0.0)
    block = tl.load(table + position // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)
    in_block = position % BLOCK_TOKENS
    places = layer + (block * block_stride + in_block * DIM)[:, None] + d[None, :]
    written = mine[:, None] & in_dim[None, :]
    if CODES:
        k, v = k.to(tl.float32), v.to(tl.float32)
        k_scales, v_scales = scales_of(tl.max(tl.abs(k), 1)), scales_of(tl.max(tl.abs(v), 1))
        k_codes, k = codes_of(k, k_scales)
        v_codes, v = codes_of(v, v_scales)
        tl.store(places, k_codes, mask=written)
        tl.store(places + plane_stride, v_codes, mask=written)
        pairs = layer_pairs + block * pair_block_stride + in_block
        tl.store(pairs, packed(k_scales, v_scales), mask=mine)
    else:
        tl.store(places, k, mask=written)
        tl.store(places + plane_stride, v, mask=written)
        k_scales = tl.full(position.shape, 1.0, tl.float32)
        v_scales = k_scales
    return k, v, k_scales, v_scales
