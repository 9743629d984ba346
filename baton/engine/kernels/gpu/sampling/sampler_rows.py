"""Functions that the kernels of the full sampler share: how they read a slot's record and a row's logits.

A row's logits are its raw ones, in whatever dtype the head gives, or, where its request edits them, float32
numbers that `edit_logits` has left beside them. A row that is held (`row_place` negative) is no kernel's
business. Vocabularies are cut into chunks of CHUNK tokens, a program each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.engine.kernels.gpu.step.step_kernels import RECORD_WORDS
from baton.engine.shared_memory.mailbox import Feature, field_offset

CHUNK = 8192

TOP_K = tl.constexpr(field_offset("top_k") // 4)
TEMPERATURE = tl.constexpr(field_offset("temperature") // 4)
TOP_P = tl.constexpr(field_offset("top_p") // 4)
SEED = tl.constexpr(field_offset("seed") // 4)
LOGPROB_COUNT = tl.constexpr(field_offset("logprobs") // 4)
STOPS_FROM = tl.constexpr(field_offset("stops_from") // 4)
STOP_IDS = tl.constexpr(field_offset("stop_ids") // 4)
REPETITION = tl.constexpr(field_offset("repetition_penalty") // 4)
PRESENCE = tl.constexpr(field_offset("presence_penalty") // 4)
FREQUENCY = tl.constexpr(field_offset("frequency_penalty") // 4)
GENERATION = tl.constexpr(field_offset("generation") // 4)
FEATURES = tl.constexpr(field_offset("features") // 4)

FILTERED = tl.constexpr(int(Feature.FILTERS))
BIASED = tl.constexpr(int(Feature.BIAS))
PENALIZED = tl.constexpr(int(Feature.PENALTIES))
HOLDS_STOPS = tl.constexpr(int(Feature.MIN_TOKENS))
LOGPROBS_BIT = tl.constexpr(int(Feature.LOGPROBS))
MASKED = tl.constexpr(int(Feature.MASKED))
EDITED = tl.constexpr(int(Feature.BIAS | Feature.PENALTIES | Feature.MIN_TOKENS | Feature.MASKED))


@triton.jit
def int_of(records, slot, FIELD: tl.constexpr):
    """A field of a slot's record, `records` the slots' as int32."""
    return tl.load(records + slot * RECORD_WORDS + FIELD)


@triton.jit
def float_of(records, slot, FIELD: tl.constexpr):
    return int_of(records, slot, FIELD).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(records, slot):
    low = int_of(records, slot, SEED).to(tl.int64) & 0xFFFFFFFF
    return (int_of(records, slot, SEED + 1).to(tl.int64) << 32) | low


@triton.jit
def limits_of(records, slot, row_place, row, VOCAB: tl.constexpr):
    """Two flags of a row's draw: limited by top-k, and limited by top-p; neither if it draws nothing."""
    draws = (tl.load(row_place + row) >= 0) & ((int_of(records, slot, FEATURES) & FILTERED) != 0)
    top_k = int_of(records, slot, TOP_K)
    return draws & (top_k > 0) & (top_k < VOCAB), draws & (float_of(records, slot, TOP_P) < 1)


@triton.jit
def logits_of(logits, edited, row, at, is_edited, VOCAB: tl.constexpr):
    """A row's logits of the tokens `at`, float32; -inf beyond the vocabulary."""
    place = row.to(tl.int64) * VOCAB + at
    there = at < VOCAB
    if is_edited:
        values = tl.load(edited + place, mask=there, other=float("-inf"))
    else:
        values = tl.load(logits + place, mask=there, other=float("-inf")).to(tl.float32)
    return values


@triton.jit
def key_of(value):
    """float32 → int32 of the same order; both zeros are 0."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    return tl.where(bits < 0, -size, size)


@triton.jit
def value_of(key):
    """The float32 of an int32 key."""
    size = tl.where(key < 0, -key, key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -size, size)
