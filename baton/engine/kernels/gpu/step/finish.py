"""A step's last kernel: tokens → slots, their lines of progress, output ring, counters, status."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.ptx import clock_ns, fence_system, together
from baton.engine.kernels.gpu.step.step_kernels import (
    APPLIED,
    CLOCK_LINES,
    CLOCK_WIDTH,
    FULL,
    FULL_LINE,
    HEAD,
    HEAD_LINE,
    HELD,
    HELD_LINE,
    RAN,
    RECORD_WORDS,
    REPLAYS,
    ROWS,
    ROWS_LINE,
    STATUS_APPLIED,
    STATUS_COUNT_MASK,
    STATUS_FEATURES,
    STATUS_LINE,
    STATUS_REPLAYS,
    STEPS,
    STEPS_LINE,
    TOKENS,
    TOKENS_LINE,
    ring_word,
)
from baton.engine.shared_memory.mailbox import MAX_STOP_IDS, Feature, field_offset
from baton.engine.shared_memory.output_ring import Finish
from baton.engine.shared_memory.slot_progress import LINE, LINE_BYTES
from baton.engine.speculation.drafts import Source

_GENERATION = tl.constexpr(field_offset("generation") // 4)
_FEATURES = tl.constexpr(field_offset("features") // 4)
_LAST_TOKEN = tl.constexpr(field_offset("last_token") // 4)
_POSITION = tl.constexpr(field_offset("position") // 4)
_END = tl.constexpr(field_offset("end") // 4)
_STOP_IDS = tl.constexpr(field_offset("stop_ids") // 4)
_STOPS = tl.constexpr(MAX_STOP_IDS)
_STOPS_FROM = tl.constexpr(field_offset("stops_from") // 4)
_MIN_TOKENS = tl.constexpr(int(Feature.MIN_TOKENS))
_PENALTIES = tl.constexpr(int(Feature.PENALTIES))
_STOP = tl.constexpr(int(Finish.STOP))
_LENGTH = tl.constexpr(int(Finish.LENGTH))
_PREDICTION = tl.constexpr(int(Source.PREDICTION))
_TABLE = tl.constexpr(int(Source.TABLE))
# A slot's line of `SlotProgress` in words of 8 bytes, two of its fields each.
LINE_WORDS = tl.constexpr(LINE_BYTES // 8)
# Those of them that are written.
_WRITTEN = tl.constexpr(5)
assert LINE.names == (
    *("position", "generation", "steps", "drafts"),
    *("accepted", "drafts_predicted", "accepted_predicted", "drafts_shared"),
    *("accepted_shared", "unused"),
)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _publish_progress(progress, counted, slot, tag, drafts, accepted, source, last):
    """Writes the lines of slots that advance, at their `last` rows, to `progress` in host memory. `counted`:
    the same lines on the device, whose counts go on while their generation is the slot's. `source`: of the
    slots' drafts."""
    word = tl.arange(0, LINE_WORDS)[None, :]
    place = slot[:, None] * LINE_WORDS + word
    mask = last[:, None] & (word < _WRITTEN)
    before = tl.load(counted + place, mask=mask, other=0)
    tags = tl.load(counted + slot * LINE_WORDS, mask=last, other=0)
    goes_on = (tags >> 32) == (tag >> 32)
    drafts, accepted = drafts.to(tl.int64), accepted.to(tl.int64)
    more = tl.where(word == 1, (1 | (drafts << 32))[:, None], 0)
    predicted, shared = source == _PREDICTION, source == _TABLE
    of_prediction = tl.where(predicted, drafts << 32, 0)
    of_table = tl.where(shared, drafts << 32, 0)
    more = tl.where(word == 2, (accepted | of_prediction)[:, None], more)
    more = tl.where(word == 3, (tl.where(predicted, accepted, 0) | of_table)[:, None], more)
    more = tl.where(word == 4, tl.where(shared, accepted, 0)[:, None], more)
    line = tl.where(word == 0, tag[:, None], tl.where(goes_on[:, None], before, 0) + more)
    together()
    tl.store(counted + place, line, mask=mask)
    tl.store(progress + place, line, mask=mask)


@triton.jit
def finish(
    control,
    clocks,
    header,
    mailbox_tail,
    words,
    progress,
    counted,
    active,
    records,
    in_output,
    row_slot,
    row_position,
    row_place,
    row_drawn,
    row_depth,
    given,
    draft_source,
    SLOTS: tl.constexpr,
    ROWS_POWER: tl.constexpr,
    CAPACITY: tl.constexpr,
    VOCAB: tl.constexpr,
    COUNTS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Ends a step. `row_drawn` int32: the rows' tokens, `row_place` int32 the places of their words behind
    the head; negative: the row writes none. A slot advances once, by its rows that write words, to the last
    of them.

    `progress` int64: `SlotProgress`' lines, and `counted` the same on the device. The lines are written
    before the ring's words; then the counters are, and last the status: who has read it sees all that was
    written before. COUNTS: tokens of requests with penalties are added to `in_output` [slots, VOCAB] int32.
    DRAFTS: slots may have several rows, of the depths `row_depth`; `given` and `draft_source` [slots] int32:
    how many of them read drafts, and where these come from.
    """
    row = tl.arange(0, ROWS_POWER)
    rows = tl.load(control + ROWS)
    row_at = tl.load(row_place + row, mask=row < rows, other=-1)
    there = row_at >= 0
    count = tl.sum(there.to(tl.int64), 0)
    slot = tl.load(row_slot + row, mask=there, other=0)
    token = tl.load(row_drawn + row, mask=there, other=0)
    position = tl.load(row_position + row, mask=there, other=0)
    mine = records + slot * RECORD_WORDS
    stopped = row < 0
    for stop in tl.static_range(_STOPS):
        stopped = stopped | (tl.load(mine + _STOP_IDS + stop, mask=there, other=-1) == token)
    # Sequence length after this token is position + 2: indices 0 .. position + 1.
    full = position + 2 >= tl.load(mine + _END, mask=there, other=0)
    why = tl.where(stopped, _STOP, tl.where(full, _LENGTH, 0))
    generation = tl.load(mine + _GENERATION, mask=there, other=0)
    features = tl.load(mine + _FEATURES, mask=there, other=0)
    last = there
    drafts = tl.zeros_like(row)
    accepted = tl.zeros_like(row)
    source = tl.zeros_like(row)
    if DRAFTS:
        behind = row + 1
        more = tl.load(row_place + behind, mask=behind < rows, other=-1) >= 0
        last = there & ((more & (tl.load(row_depth + behind, mask=behind < rows, other=0) > 0)) == 0)
        drafts = tl.load(given + slot, mask=last, other=0)
        accepted = tl.load(row_depth + row, mask=last, other=0)
        source = tl.load(draft_source + slot, mask=last, other=0)
    if COUNTS:
        counts = in_output + slot.to(tl.int64) * VOCAB + token
        tl.atomic_add(counts, 1, mask=there & ((features & _PENALTIES) != 0), sem="relaxed")
    head = tl.load(control + HEAD)
    place = head + row_at
    tag = (generation.to(tl.int64) << 32) | (position + 1)
    _publish_progress(progress, counted, slot, tag, drafts, accepted, source, last)
    together()
    fence_system()  # records of logprobs and the slots' lines are seen before the words
    tl.store(words + place % CAPACITY, ring_word(place, token, slot, generation, why, CAPACITY), mask=there)
    tl.store(mine + _LAST_TOKEN, token, mask=last)
    tl.store(mine + _POSITION, position + 1, mask=last)
    tl.store(active + slot, why == 0, mask=last)
    # From the token on at which stop ids count, the row no longer wants the full sampler for them.
    counts_next = position + 2 >= tl.load(mine + _STOPS_FROM, mask=there, other=0)
    tl.store(mine + _FEATURES, features & ~_MIN_TOKENS, mask=last & counts_next)
    together()

    head += count
    steps = tl.load(control + STEPS) + tl.load(control + RAN)
    tokens = tl.load(control + TOKENS) + count
    replays = tl.load(control + REPLAYS) + 1
    applied = tl.load(control + APPLIED)
    tl.store(control + HEAD, head)
    tl.store(control + STEPS, steps)
    tl.store(control + TOKENS, tokens)
    tl.store(control + REPLAYS, replays)
    slots = tl.arange(0, ROWS_POWER)
    in_slots = slots < SLOTS
    is_active = tl.load(active + slots, mask=in_slots, other=0).to(tl.int32) != 0
    features = tl.load(records + slots * RECORD_WORDS + _FEATURES, mask=in_slots, other=0)
    used = tl.reduce(tl.where(is_active, features, 0), 0, _either)
    status = tl.sum(is_active.to(tl.int64), 0) | (used.to(tl.int64) << STATUS_FEATURES)
    status = status | ((applied & STATUS_COUNT_MASK) << STATUS_APPLIED)
    status = status | ((replays & STATUS_COUNT_MASK) << STATUS_REPLAYS)
    tl.store(mailbox_tail, applied)
    tl.store(header + STEPS_LINE, steps)
    tl.store(header + FULL_LINE, tl.load(control + FULL))
    tl.store(header + HELD_LINE, tl.load(control + HELD))
    tl.store(header + TOKENS_LINE, tokens)
    tl.store(header + HEAD_LINE, head)
    tl.store(header + ROWS_LINE, tl.where(tl.load(control + RAN) != 0, count, -1))
    fence_system()
    tl.store(header + STATUS_LINE, status)
    line = clocks + ((replays - 1) % CLOCK_LINES) * CLOCK_WIDTH
    tl.store(line + 3, rows)
    together()
    tl.store(line + 2, clock_ns())
