"""Rows for drafts: behind `begin`, which has listed one row for each slot that runs.

    before   a  b  c                      rows in the order of `begin`
    after    a  a1 a2  b  c  c1           a slot's rows lie side by side; `depth` 0 1 2  0  0 1

The row of depth d reads a slot's d-th draft, d positions behind its last token. Rows are given by depth: the
first drafts of all slots before any second one, beginning with another slot each step. No row of depth 0 is
moved out by a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from baton.device.ptx import together
from baton.engine.kernels.gpu.attention.items import TILE, item_span
from baton.engine.kernels.gpu.step.step_kernels import HEAD, RECORD_WORDS, ROWS, STEPS, TAIL
from baton.engine.shared_memory.mailbox import Feature, field_offset
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import SlotDrafts

_MASKED = tl.constexpr(int(Feature.MASKED))
_FEATURES = tl.constexpr(field_offset("features") // 4)
_GENERATION = tl.constexpr(field_offset("generation") // 4)
_CAPACITY = tl.constexpr(field_offset("capacity") // 4)
_END = tl.constexpr(field_offset("end") // 4)
# The upper half of the word of the entry's kind.
_MOST_DRAFTS = tl.constexpr(field_offset("kind") // 4)
assert field_offset("most_drafts") == field_offset("kind") + 2
_WIDTH = tl.constexpr(MOST_DRAFTS)
_DEPTHS = tl.constexpr(triton.next_power_of_2(1 + MOST_DRAFTS))


@triton.jit
def _in_turn(x, lane, first):
    """Inclusive sums of x [lanes] in the order that begins with lane `first` and ends with the one before."""
    sums = tl.cumsum(x, 0)
    before = tl.sum(tl.where(lane < first, x, 0), 0)
    return tl.where(lane < first, sums + tl.sum(x, 0) - before, sums - before)


@triton.jit
def _useful(records, slot, position, there, count, tag):
    """Number of `count` drafts that may have a row: those of the slot's very position, as many as the request
    allows, with blocks for their KV, and that could give a token before the sequence's end."""
    mine = records + slot * RECORD_WORDS
    generation = tl.load(mine + _GENERATION, mask=there, other=0)
    wanted = (generation.to(tl.int64) << 32) | position
    features = tl.load(mine + _FEATURES, mask=there, other=0)
    count = tl.where((tag == wanted) & ((features & _MASKED) == 0), count, 0)
    most = (tl.load(mine + _MOST_DRAFTS, mask=there, other=0) >> 16) & 0xFFFF
    count = tl.minimum(count, most)
    count = tl.minimum(count, tl.load(mine + _CAPACITY, mask=there, other=0) - 1 - position)
    count = tl.minimum(count, tl.load(mine + _END, mask=there, other=0) - 2 - position)
    return tl.where(there, tl.maximum(count, 0), 0)


@triton.jit(do_not_specialize=["bucket"])
def _add_drafts(
    control,
    records,
    row_slot,
    row_token,
    row_position,
    row_place,
    row_depth,
    draft_tokens,
    draft_count,
    draft_most,
    draft_tag,
    given,
    item_bounds,
    bucket,
    SLOTS_POWER: tl.constexpr,
    ROWS_POWER: tl.constexpr,
    MOST: tl.constexpr,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
):
    lane = tl.arange(0, SLOTS_POWER)
    rows = tl.load(control + ROWS).to(tl.int32)
    there = lane < rows
    slot = tl.load(row_slot + lane, mask=there, other=0)
    token = tl.load(row_token + lane, mask=there, other=0)
    position = tl.load(row_position + lane, mask=there, other=0)
    tag = tl.load(draft_tag + slot, mask=there, other=-1)
    count = tl.load(draft_count + slot, mask=there, other=0)
    count = tl.minimum(count, tl.load(draft_most + slot, mask=there, other=0))
    count = _useful(records, slot, position, there, count, tag)

    # Each row may write a word.
    room = tl.load(control + TAIL) + CAPACITY - tl.load(control + HEAD)
    room = tl.minimum(room, bucket).to(tl.int32)
    first = (tl.load(control + STEPS) % tl.maximum(rows, 1)).to(tl.int32)
    granted = tl.zeros_like(lane)
    used = rows
    for _ in tl.static_range(MOST):
        wants = count > granted
        fits = wants & (used + _in_turn(wants.to(tl.int32), lane, first) <= room)
        if FIXED > 0:
            for group in tl.static_range(GROUPS):
                window = tl.load(item_bounds + group * 2)
                _, span = item_span(position, window, TILE)
                own = tl.where(there, tl.cdiv(span, FIXED), 0)
                # No fewer than a row of any depth has.
                each = tl.cdiv(tl.minimum(position + MOST + 1, window + TILE - 1), FIXED)
                listed = tl.sum(own + granted * each, 0)
                more = _in_turn(tl.where(wants, each, 0), lane, first)
                fits = fits & (listed + more <= bucket + tl.load(item_bounds + group * 2 + 1))
        granted += fits.to(tl.int32)
        used += tl.sum(fits.to(tl.int32), 0)

    own = tl.where(there, granted + 1, 0)
    at = (tl.cumsum(own, 0) - own)[:, None]
    depths = tl.arange(0, _DEPTHS)[None, :]
    has_row = depths < own[:, None]
    drafts = draft_tokens + slot[:, None] * _WIDTH + depths - 1
    draft = tl.load(drafts, mask=has_row & (depths > 0), other=0)
    # An id beyond the vocabulary is a draft that is wrong, and must not be looked up.
    draft = tl.where((draft >= 0) & (draft < VOCAB), draft, 0)
    row = tl.arange(0, ROWS_POWER)
    together()
    tl.store(row_depth + row, 0, mask=row < bucket)
    together()
    tl.store(row_slot + at + depths, slot[:, None] + depths * 0, mask=has_row)
    tl.store(row_token + at + depths, tl.where(depths == 0, token[:, None], draft), mask=has_row)
    tl.store(row_position + at + depths, position[:, None] + depths, mask=has_row)
    tl.store(row_place + at + depths, at + depths, mask=has_row)
    tl.store(row_depth + at + depths, depths + at * 0, mask=has_row)
    tl.store(given + slot, granted, mask=there)
    tl.store(control + ROWS, used.to(tl.int64))


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Rows of a step, int32 [R] each: slot, token read, its position, depth (0: a slot's first row; d: its
    d-th draft), and `place`, that of the row's word behind the ring's head: negative where it writes none,
    since it is held, its draft was not accepted, or it is of no slot."""

    slot: Tensor
    token: Tensor
    position: Tensor
    depth: Tensor
    place: Tensor


def add_drafts(
    rows: RowArrays,
    given: Tensor,
    drafts: SlotDrafts,
    records: Tensor,
    control: Tensor,
    item_bounds: Tensor,
    bucket: int,
    *,
    most: int,
    vocab: int,
    ring_words: int,
    fixed: int | None,
) -> None:
    """Gives rows to drafts, up to `bucket` rows in all; `given` [slots] int32: how many of each slot that
    runs.

    `most`: drafts of a slot that a step may verify, at most MOST_DRAFTS. `records` [slots, 32] int32;
    `item_bounds` [groups, 2] int32 and `fixed` as `begin` takes them: drafts are left out that would need
    more attention items than there can be. `ring_words`: of the output ring.
    """
    slots = given.shape[0]
    _add_drafts[(1,)](
        control, records, rows.slot, rows.token, rows.position, rows.place, rows.depth,
        drafts.tokens, drafts.count, drafts.most, drafts.tag, given, item_bounds, bucket,
        SLOTS_POWER=triton.next_power_of_2(slots), ROWS_POWER=triton.next_power_of_2(len(rows.slot)),
        MOST=most, VOCAB=vocab, CAPACITY=ring_words, GROUPS=item_bounds.shape[0], TILE=TILE,
        FIXED=fixed or 0, num_warps=4,
    )  # fmt: skip
