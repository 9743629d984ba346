"""The parts of a step besides the model, as kernels of one program each: fetch and begin here, `finish`
beside.

    fetch    host's mailbox → inbox on the GPU, beside the sampler of the step before (it takes 4 µs)
    begin    inbox → slots; slots → rows; or nothing at all, where the ring has no room
    (plan    rows → the attention's items, a cache group: `plan_items`)
    finish   tokens → slots, ring, counters

All state is in `control` (int64, by the numbers below), the slots' records, and the rows' arrays. The words
of the ring and the counters behind it are written where the host reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.device.ptx import clock_ns, fence_system, together
from baton.engine.kernels.gpu.attention.items import item_span
from baton.engine.shared_memory.logprob_records import MAX_LOGPROBS
from baton.engine.shared_memory.mailbox import ENTRY, EntryKind, Feature, field_offset
from baton.engine.shared_memory.output_ring import LAPS, Finish

# Places in `control`.
STEPS = tl.constexpr(0)  # steps that ran: a step without room has not
HEAD = tl.constexpr(1)  # words written to the ring
TAIL = tl.constexpr(2)  # words the reader has taken, as last seen
FETCHED = tl.constexpr(3)  # entries read from the mailbox
APPLIED = tl.constexpr(4)  # entries that took effect, or came too late to
WAITING = tl.constexpr(5)  # entries in the inbox
TAKEN = tl.constexpr(6)  # of these, applied
FULL = tl.constexpr(7)
HELD = tl.constexpr(8)
REPLAYS = tl.constexpr(9)
TOKENS = tl.constexpr(10)
ROWS = tl.constexpr(11)  # rows of this step
RAN = tl.constexpr(12)  # whether this step has room
TURN = tl.constexpr(13)  # the slot whose row comes first: the first that the last step held without items
CONTROL_WORDS = 16

# Places in `header`, the ring's counters in host memory: each in a cache line of its own, in 8-byte words.
TAIL_LINE = tl.constexpr(0)
STEPS_LINE = tl.constexpr(8)
FULL_LINE = tl.constexpr(16)
HELD_LINE = tl.constexpr(24)
STATUS_LINE = tl.constexpr(32)
TOKENS_LINE = tl.constexpr(33)
HEAD_LINE = tl.constexpr(34)
# Rows that the last step advanced; negative where the ring had no room for a step.
ROWS_LINE = tl.constexpr(35)

# `clocks` has one line for each replay: when `begin` started, when the product of the LM head had ended
# (where the graph samples), when all was done; and how many rows it had.
CLOCK_WIDTH = tl.constexpr(4)
CLOCK_LINES = tl.constexpr(1 << 12)

RECORD_WORDS = tl.constexpr(ENTRY.itemsize // 4)
INBOX_ENTRIES = 16

_FROM_STEP = tl.constexpr(field_offset("from_step") // 4)
_KIND = tl.constexpr(field_offset("kind") // 4)
# The word has the request's most drafts above the kind.
_KIND_BITS = tl.constexpr(0xFFFF)
_SLOT = tl.constexpr(field_offset("slot") // 4)
_GENERATION = tl.constexpr(field_offset("generation") // 4)
_FEATURES = tl.constexpr(field_offset("features") // 4)
_LAST_TOKEN = tl.constexpr(field_offset("last_token") // 4)
_POSITION = tl.constexpr(field_offset("position") // 4)
_CAPACITY = tl.constexpr(field_offset("capacity") // 4)
_LOGPROBS = tl.constexpr(int(Feature.LOGPROBS))
_MAX_LOGPROBS = tl.constexpr(MAX_LOGPROBS)
_ADMIT = tl.constexpr(int(EntryKind.ADMIT))
_EXTEND = tl.constexpr(int(EntryKind.EXTEND))
_PREEMPT = tl.constexpr(int(EntryKind.PREEMPT))
_CANCELLED = tl.constexpr(int(Finish.CANCELLED))
_PREEMPTED = tl.constexpr(int(Finish.PREEMPTED))
_LAPS = tl.constexpr(LAPS)
# The status word: active slots, the features they use, entries applied, replays ended.
STATUS_FEATURES = tl.constexpr(13)
STATUS_APPLIED = tl.constexpr(22)
STATUS_REPLAYS = tl.constexpr(42)
STATUS_COUNT_MASK = tl.constexpr((1 << 20) - 1)
assert max(Feature).bit_length() <= STATUS_APPLIED.value - STATUS_FEATURES.value


@triton.jit
def ring_word(position, token, slot, generation, finish, CAPACITY: tl.constexpr):
    """`baton.engine.shared_memory.output_ring`'s word for a ring position."""
    lap = (position // CAPACITY) % _LAPS + 1
    low = token.to(tl.int64) | (slot.to(tl.int64) << 24) | (generation.to(tl.int64) << 36)
    return low | (finish.to(tl.int64) << 52) | (lap << 56)


@triton.jit
def fetch(control, header, mailbox_words, mailbox_laps, inbox, ENTRIES: tl.constexpr, CAPACITY: tl.constexpr):
    """Copies the mailbox's entries to the inbox; `mailbox_words` int32 and `mailbox_laps` int64 are the same
    entries in host memory."""
    tl.store(control + TAIL, tl.load(header + TAIL_LINE, volatile=True))
    if tl.load(control + WAITING) == 0:
        fetched = tl.load(control + FETCHED)
        e = tl.arange(0, ENTRIES)
        place = (fetched + e) % CAPACITY
        lap = tl.load(mailbox_laps + place * (RECORD_WORDS // 2), volatile=True)
        there = lap == (fetched + e) // CAPACITY + 1
        count = tl.min(tl.where(there, ENTRIES, e), 0)
        # An entry's lap is written last: what is read behind it is whole.
        fence_system()
        w = tl.arange(0, RECORD_WORDS)
        mask = (e < count)[:, None] & (w < RECORD_WORDS)[None, :]
        words = tl.load(mailbox_words + place[:, None] * RECORD_WORDS + w[None, :], mask=mask, other=0)
        tl.store(inbox + e[:, None] * RECORD_WORDS + w[None, :], words, mask=mask)
        tl.store(control + WAITING, count.to(tl.int64))
        tl.store(control + FETCHED, fetched + count)


@triton.jit
def _write_record(logprobs, last, position, CAPACITY: tl.constexpr, TOP: tl.constexpr, POWER: tl.constexpr):
    """`baton.engine.shared_memory.logprob_records`' record of a ring position, from a row of
    `SlotSampler.last_records`."""
    width: tl.constexpr = 4 + 2 * TOP  # lap (two words), count, logprob, ids, logprobs
    record = logprobs + (position % CAPACITY) * width
    j = tl.arange(0, POWER)
    # The slot's row has room for the most alternatives, a record for as many as this worker reports.
    source = tl.where(j < 2 + TOP, j, j - TOP + _MAX_LOGPROBS)
    values = tl.load(last + source, mask=j < 2 + 2 * TOP, other=0)
    lap = position // CAPACITY + 1
    tl.store(record + 2 + j, values, mask=j < 2 + 2 * TOP)
    tl.store(record, lap.to(tl.int32))
    tl.store(record + 1, (lap >> 32).to(tl.int32))
    together()
    fence_system()  # the record is seen before the word that makes it count
    together()


@triton.jit(do_not_specialize=["bucket", "can"])
def begin(
    control,
    clocks,
    inbox,
    words,
    active,
    records,
    logprobs,
    last_records,
    row_slot,
    row_token,
    row_position,
    row_place,
    item_bounds,
    bucket,
    can,
    SLOTS: tl.constexpr,
    ROWS_POWER: tl.constexpr,
    WORDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOP: tl.constexpr,
    RECORD_POWER: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Begins a step. `bucket`: rows that this graph has; WORDS: of the ring, that a step may write; `can`:
    features of its sampler. ROWS_POWER: a power of two, no less than the rows of the largest bucket. `words`
    are the ring's, `records` the slots' as int32; `logprobs` the ring's records as int32, of TOP alternatives
    each (0: none), and `last_records` the slots' own of the tokens they are admitted with.

    Applies no entry that this graph has no room for, or whose features its sampler lacks: a later graph
    does, and takes what stands behind it as well.

    `item_bounds` [GROUPS, 2] int32: each cache group's window, and the attention items that its list holds
    beyond one a row. With parts of FIXED tokens (mode `exact`) rows that share blocks can need more than that
    in all: the first rows that fit are run, the others are held, and the next step begins with the first of
    those. One row alone always fits, so none is held for ever.
    """
    replay = tl.load(control + REPLAYS)
    tl.store(clocks + (replay % CLOCK_LINES) * CLOCK_WIDTH, clock_ns())
    steps = tl.load(control + STEPS)
    head = tl.load(control + HEAD)
    ran = head + WORDS <= tl.load(control + TAIL) + CAPACITY
    lane = tl.arange(0, ROWS_POWER)
    in_slots = lane < SLOTS
    turn = tl.load(control + TURN).to(tl.int32)
    slots = (lane + turn) % SLOTS
    running = tl.sum(tl.load(active + slots, mask=in_slots, other=0).to(tl.int32), 0)
    waiting = tl.load(control + WAITING)
    taken = tl.load(control + TAKEN)
    first = taken
    go_on = ran.to(tl.int32)
    w = tl.arange(0, RECORD_WORDS)
    while (go_on > 0) & (taken < waiting):
        entry = inbox + taken * RECORD_WORDS
        slot = tl.load(entry + _SLOT)
        generation = tl.load(entry + _GENERATION)
        kind = tl.load(entry + _KIND) & _KIND_BITS
        admits = kind == _ADMIT
        extends = kind == _EXTEND
        due = tl.load(entry + _FROM_STEP).to(tl.int64) <= steps
        lacking = tl.load(entry + _FEATURES) & ~can
        takes = due & (((running < bucket) & (lacking == 0)) | (admits == 0))
        record = records + slot * RECORD_WORDS
        current = (tl.load(active + slot).to(tl.int32) != 0) & (tl.load(record + _GENERATION) == generation)
        emits = takes & (admits | (current & (extends == 0)))
        token = tl.where(admits, tl.load(entry + _LAST_TOKEN), 0)
        finish = tl.where(admits, 0, tl.where(kind == _PREEMPT, _PREEMPTED, _CANCELLED))
        values = tl.load(entry + w)
        capacity = tl.load(entry + _CAPACITY)
        together()
        tl.store(record + w, values, mask=w < tl.where(takes & admits, RECORD_WORDS, 0))
        tl.store(record + _CAPACITY, capacity, mask=takes & extends & current)
        tl.store(active + slot, admits, mask=emits)
        if TOP > 0:  # noqa: SIM102 (a constexpr: without records the rest is not compiled)
            if takes & admits & ((tl.load(entry + _FEATURES) & _LOGPROBS) != 0):
                last = last_records + slot * (2 + 2 * _MAX_LOGPROBS)
                _write_record(logprobs, last, head, CAPACITY, TOP, RECORD_POWER)
        tl.store(
            words + head % CAPACITY, ring_word(head, token, slot, generation, finish, CAPACITY), mask=emits
        )
        head += emits.to(tl.int64)
        running += tl.where(emits, tl.where(admits, 1, -1), 0)
        taken += takes.to(tl.int64)
        go_on = takes.to(tl.int32)
        together()
    tl.store(control + APPLIED, tl.load(control + APPLIED) + taken - first)
    done = taken == waiting
    tl.store(control + TAKEN, tl.where(done, 0, taken))
    tl.store(control + WAITING, tl.where(done, 0, waiting))
    tl.store(control + HEAD, head)

    mine = records + slots * RECORD_WORDS
    position = tl.load(mine + _POSITION, mask=in_slots, other=0)
    served = lane < tl.where(ran, SLOTS, 0)
    is_active = served & (tl.load(active + slots, mask=in_slots, other=0).to(tl.int32) != 0)
    # A slot without a block for its next token is held.
    capacity = tl.load(mine + _CAPACITY, mask=in_slots, other=0)
    held = is_active & (position >= capacity)
    runs = is_active & (position < capacity)
    row = tl.cumsum(runs.to(tl.int32), 0) - 1
    runs = runs & (row < bucket)
    if FIXED > 0:
        fits = runs
        for group in tl.static_range(GROUPS):
            _, span = item_span(position, tl.load(item_bounds + group * 2), TILE)
            parts = tl.where(runs, tl.cdiv(span, FIXED), 0)
            fits = fits & (tl.cumsum(parts, 0) <= bucket + tl.load(item_bounds + group * 2 + 1))
        left_out = runs & (fits == 0)
        next_turn = tl.min(tl.where(left_out, lane, ROWS_POWER), 0)
        next_turn = tl.where(next_turn < ROWS_POWER, (turn + next_turn) % SLOTS, 0)
        tl.store(control + TURN, tl.where(ran, next_turn, turn).to(tl.int64))
        held = held | left_out
        runs = fits
    count = tl.sum(runs.to(tl.int32), 0)
    tl.store(row_slot + row, slots, mask=runs)
    tl.store(row_token + row, tl.load(mine + _LAST_TOKEN, mask=in_slots, other=0), mask=runs)
    tl.store(row_position + row, position, mask=runs)
    tl.store(row_place + row, row, mask=runs)
    # Rows beyond keep the tokens that they had: any, but not all the same, since steps without sequences are
    # what a start measures.
    beyond = (lane >= count) & (lane < bucket)
    tl.store(row_slot + lane, 0, mask=beyond)
    tl.store(row_position + lane, 0, mask=beyond)
    tl.store(row_place + lane, -1, mask=beyond)
    tl.store(control + ROWS, count.to(tl.int64))
    tl.store(control + RAN, ran.to(tl.int64))
    tl.store(control + HELD, tl.load(control + HELD) + tl.sum(held.to(tl.int64), 0))
    tl.store(control + FULL, tl.load(control + FULL) + tl.where(ran, 0, 1))
