"""The next decode step: whether the queue has a place for one, and with how many rows. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from baton.engine.plan.decode_state import SIMPLE, DecodeState
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.shared_memory.mailbox import Feature
from baton.engine.shared_memory.step_shape import StepShape

# Steps launched and not ended: one runs, one is queued, so that steps follow one another without a gap. Two
# steps shorter than `SHORT_S` may end before the host polls again, so of those one more is queued.
QUEUED, QUEUED_SHORT = 2, 3
SHORT_S = 0.002
# Rows that a step has beyond those it needs, for admissions that are posted while it waits for its turn: as
# many as arrive in one step at most, on a worker that keeps up.
MOST_EXPECTED = 4
# The smallest batch that shares launches, except one of all slots, and those that are left out: a graph is
# made for each and several numbers of prompt rows, beside which a few rows more or less make no difference.
_LEAST_MIXED, _LEFT_OUT = 16, (24, 48)
# Rows of steps with drafts: few sizes, since each is two graphs more.
_DRAFT_BATCHES = (8, 16, 32, 64, 96, 128, 192, 256)


def next_rows(state: DecodeState, *, behind_prefill: bool = False) -> DecodeRows | None:
    """Rows of the next decode step by itself; None where it would have no effect, or the queue or the output
    ring no room. `behind_prefill`: a prefill step that has not ended is queued on the same stream. It takes
    the place of a decode step, so that both alternate; one that shares its launch with a decode step only
    once that has ended, which is before it."""
    most = QUEUED_SHORT if 0 < state.typical_s < SHORT_S else QUEUED
    most -= behind_prefill and state.ended >= state.mixed_at
    if state.queued >= most or not _is_possible(state):
        return None
    return _rows(state, state.batches, state.draft_batches)


def rows_to_mix(state: DecodeState) -> DecodeRows | None:
    """Rows of a decode step that may share a launch with prompts: that is for the quicker sampler alone. None
    where none may, or it would have no effect."""
    if not state.mixed_batches or not _is_possible(state):
        return None
    rows = _rows(state, state.mixed_batches)
    return rows if rows.simple else None


def _is_possible(state: DecodeState) -> bool:
    return state.has_effect and (state.queued > 0 or state.room)


def _rows(state: DecodeState, batches: tuple[int, ...], draft_batches: tuple[int, ...] = ()) -> DecodeRows:
    """The smallest batch that surely has room: slots only end by themselves, and what was posted is
    counted. Where some slot may have drafts, as many rows as the policy chooses, else room for as many as it
    may, as far as there are such batches."""
    features = state.features
    for _, more in state.admissions:
        features |= more
    # Entries may be posted until this step begins, and it is launched up to a step before.
    slots = state.active + len(state.admissions) + min(len(state.arriving), MOST_EXPECTED)
    rows, simple = min(state.shape.slots, slots), not features & ~SIMPLE
    plain = batches[bisect_left(batches, rows)]
    if features & Feature.DRAFTS and draft_batches and rows < draft_batches[-1]:
        if state.policy is None:
            wanted = min(rows * state.shape.rows_per_slot, draft_batches[-1])
        else:
            wanted = state.policy.choose(rows, plain)
        if wanted:
            return _decode_rows(draft_batches[bisect_left(draft_batches, wanted)], simple, drafts=True)
    return _decode_rows(plain, simple)


# One object for each batch and sampler, since a step is planned every few milliseconds.
_decode_rows = lru_cache(maxsize=1024)(DecodeRows)


def batches_up_to(rows: int) -> list[int]:
    """Batch sizes that have a graph of their own: powers of two with halves between, from 128 on with one and
    a quarter, too, where each row makes a step longer, and `rows` itself. By measurements of an 8B model in
    bf16 on an H200: a step of 160 rows takes 9.2 ms, in a graph of 192 9.6; 448 rows take longer than 512."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    while steps[-1] < rows:
        steps += [steps[-1] * quarters // 4 for quarters in (5, 6, 8)]
    return [step for step in steps if step < rows] + [rows]


def batches_of(shape: StepShape) -> list[int]:
    """Numbers of rows of all steps of this shape: those without drafts, and those with."""
    return sorted({*batches_up_to(shape.slots), *batches_up_to(shape.rows)})


def draft_batches_up_to(shape: StepShape) -> list[int]:
    """Numbers of rows of steps with drafts; none where slots have one row."""
    most = min(shape.rows, _DRAFT_BATCHES[-1])
    return [*(rows for rows in _DRAFT_BATCHES if rows < most), most] if shape.rows_per_slot > 1 else []


def mixed_batches_up_to(slots: int) -> list[int]:
    """Batch sizes of decode steps that share launches with prompts, which have no drafts, on a worker of
    `slots` slots."""
    *smaller, _ = batches_up_to(slots)
    return [batch for batch in smaller if batch >= _LEAST_MIXED and batch not in _LEFT_OUT] + [slots]
