"""Prompt lookup on the GPU, the same as `PromptLookup`: what follows the longest match of the last tokens.

    scan     each place of a slot's history: how many of the last tokens it ends with → the best place
    propose  the tokens behind that place, or what the lookahead table has of a longer match → the drafts

Two nodes behind a step's `begin`, which compare all of the history: 4 bytes a token, where attention reads
thousands.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.speculation.lookahead import probe
from baton.engine.kernels.gpu.step.step_kernels import RECORD_WORDS
from baton.engine.shared_memory.mailbox import Feature, field_offset
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import NO_TAG, SlotDrafts, Source
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_table import LookaheadTable
from baton.engine.speculation.prompt_lookup import DRAFTS_BEHIND_OTHER, DRAFTS_BY_MATCH, LONGEST_MATCH

# Places that a program compares.
_CHUNK = 2048
# A found match in an int32: its rank above, and one more than its place in the order of places below. Matches
# of the last tokens rank by their length above all those of the tokens before the last one.
_RANK_SHIFT = tl.constexpr(27)
_MOST_PLACES = 1 << _RANK_SHIFT.value
_PLACE = tl.constexpr(_MOST_PLACES - 1)
_LONGEST = tl.constexpr(LONGEST_MATCH)
_SHORTEST = tl.constexpr(next(length for length, drafts in enumerate(DRAFTS_BY_MATCH) if drafts))
# From this length on a match bears out the most drafts, below as many as it is long.
_ALL_FROM = tl.constexpr(DRAFTS_BY_MATCH.index(MOST_DRAFTS))
assert DRAFTS_BY_MATCH[2:] == tuple(
    n if n < _ALL_FROM.value else MOST_DRAFTS for n in range(2, LONGEST_MATCH + 1)
)
_RANK_OF_LAST = tl.constexpr(LONGEST_MATCH - _SHORTEST.value + 1)
_RANK_OF_OTHER = tl.constexpr(1 - _SHORTEST.value)
assert 1 << (31 - _RANK_SHIFT.value) > _RANK_OF_LAST.value + LONGEST_MATCH
_BEHIND_OTHER = tl.constexpr(DRAFTS_BEHIND_OTHER)
_MOST = tl.constexpr(MOST_DRAFTS)
_LANES = tl.constexpr(triton.next_power_of_2(MOST_DRAFTS))
_NO_TAG = tl.constexpr(NO_TAG)
_TEXT = tl.constexpr(int(Source.TEXT))
_PREDICTION = tl.constexpr(int(Source.PREDICTION))
_TABLE = tl.constexpr(int(Source.TABLE))
_MASKED = tl.constexpr(int(Feature.MASKED))
_FEATURES = tl.constexpr(field_offset("features") // 4)
_GENERATION = tl.constexpr(field_offset("generation") // 4)
_POSITION = tl.constexpr(field_offset("position") // 4)
# The upper half of the word of the entry's kind.
_MOST_DRAFTS = tl.constexpr(field_offset("kind") // 4)
assert field_offset("most_drafts") == field_offset("kind") + 2


@triton.jit
def _searches(active, records, slot):
    """True if a slot's next step may verify drafts."""
    mine = records + slot * RECORD_WORDS
    masked = (tl.load(mine + _FEATURES) & _MASKED) != 0
    most = (tl.load(mine + _MOST_DRAFTS) >> 16) & 0xFFFF
    return (tl.load(active + slot).to(tl.int32) != 0) & (most > 0) & (masked == 0)


@triton.jit
def _matches_at(back, row, place, in_text, before, ended, predicted, ring, matches):
    """Narrows `matches` to those that have, `back` places before, the token that the text has as far before
    its `ended`-th."""
    last = tl.load(row + predicted + tl.maximum(ended - 1 - back, 0) % ring)
    at = tl.where(in_text & (place - back < predicted), place - back + ring, place - back)
    matches = matches & (before >= back)
    return matches & (tl.load(row + at, mask=matches, other=0) == last)


@triton.jit
def _lengths(row, place, in_text, before, ended, predicted, ring, matches):
    """Number of tokens that the text up to its `ended`-th and each place of `matches` end with alike; 0 if
    they are too few."""
    for back in tl.static_range(_SHORTEST):
        matches = _matches_at(back, row, place, in_text, before, ended, predicted, ring, matches)
    length = matches.to(tl.int32) * _SHORTEST
    if tl.max(length, 0) > 0:
        for back in tl.static_range(_SHORTEST, _LONGEST):
            matches = _matches_at(back, row, place, in_text, before, ended, predicted, ring, matches)
            length += matches.to(tl.int32)
    return length


@triton.jit
def _scan(
    active, records, tokens, end, fixed, best, LENGTH: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0)
    first = tl.program_id(1) * CHUNK
    predicted = tl.load(fixed + slot)
    ended = tl.load(end + slot)
    ring = LENGTH - predicted
    kept = tl.minimum(ended, ring)
    if (first >= predicted + kept) | (kept < _SHORTEST):
        return
    if _searches(active, records, slot) == 0:
        return
    row = tokens + slot.to(tl.int64) * LENGTH
    place = first + tl.arange(0, CHUNK)
    in_text = place >= predicted
    # Tokens of the text behind this one: of the last 0.
    behind = (ended - 1 - (place - predicted) + ring) % ring
    # So many tokens come before, there and before the last one; and something follows.
    before = tl.where(in_text, kept - 1 - behind, tl.minimum(place, kept - 1))
    there = place < tl.where(in_text, predicted + kept, predicted - 1)
    matches = there & ((behind > 0) | (place < predicted))
    length = _lengths(row, place, in_text, before, ended, predicted, ring, matches)
    # In the order of places the text comes first, from its oldest token on, then the prediction.
    order = tl.where(in_text, before, kept + place)
    found = tl.where(length > 0, ((_RANK_OF_LAST + length) << _RANK_SHIFT) + order + 1, 0)
    # The same of the tokens before the last one, where two follow; and each of the two from its newest token
    # on.
    matches = there & tl.where(in_text, behind > 1, place < predicted - 2)
    before = tl.minimum(before, kept - 2)
    length = _lengths(row, place, in_text, before, ended - 1, predicted, ring, matches)
    order = tl.where(in_text, behind, kept + predicted - 1 - place)
    found_other = tl.where(length > 0, ((_RANK_OF_OTHER + length) << _RANK_SHIFT) + order + 1, 0)
    found = tl.max(tl.maximum(found, found_other), 0)
    if found > 0:
        tl.atomic_max(best + slot, found, sem="relaxed")


@triton.jit
def _borne_out(length):
    """Number of drafts that a match of `length` tokens bears out."""
    return tl.where(length >= _ALL_FROM, _MOST, length)


@triton.jit
def _propose(
    active, records, tokens, end, fixed, best, draft_tokens, draft_count, draft_tag, draft_source,
    cells, seeds, LENGTH: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    searches = _searches(active, records, slot)
    found = tl.load(best + slot)
    tl.store(best + slot, 0)
    predicted = tl.load(fixed + slot)
    ended = tl.load(end + slot)
    ring = LENGTH - predicted
    kept = tl.minimum(ended, ring)
    rank = found >> _RANK_SHIFT
    of_last = rank > _RANK_OF_LAST
    length = tl.where(of_last, rank - _RANK_OF_LAST, 0)
    order = (found & _PLACE) - 1
    in_text = order < kept
    # The match's last token, as the number of tokens behind it in the text, or its place in the prediction;
    # and how many tokens follow from the first draft on.
    behind = tl.where(of_last, kept - 1 - order, order)
    place = tl.where(of_last, order - kept, predicted - 1 - (order - kept))
    follow = tl.where(in_text, behind, predicted - 1 - place) - tl.where(of_last, 0, 1)
    count = tl.where(of_last, _borne_out(length), _BEHIND_OTHER)
    count = tl.where(found > 0, tl.where(in_text, count, tl.minimum(count, follow)), 0)
    draft = tl.arange(0, _LANES)
    # Where drafts reach the text's end, it goes on with the drafts themselves.
    follow = tl.maximum(follow, 1)
    of_text = predicted + (ended - follow + draft % follow) % ring
    row = tokens + slot.to(tl.int64) * LENGTH
    at = tl.where(in_text, of_text, predicted - follow + draft)
    token = tl.load(row + at, mask=draft < count, other=0)
    source = tl.where(in_text | (count == 0), _TEXT, _PREDICTION)
    if BUCKETS > 0:
        shared, known, ids = probe(cells, seeds, slot, row, predicted, ended, ring, kept, searches, BUCKETS)
        longer = shared > length
        count = tl.where(longer, tl.minimum(_borne_out(shared), known), count)
        token = tl.where(longer, ids.to(tl.int32), token)
        source = tl.where(longer, _TABLE, source)
    tl.store(draft_tokens + slot * _MOST + draft, token, mask=draft < count)
    tl.store(draft_count + slot, count)
    tl.store(draft_source + slot, source)
    mine = records + slot * RECORD_WORDS
    tag = (tl.load(mine + _GENERATION).to(tl.int64) << 32) | tl.load(mine + _POSITION)
    tl.store(draft_tag + slot, tl.where(searches, tag, _NO_TAG))


def find_match(
    history: History,
    drafts: SlotDrafts,
    active: Tensor,
    records: Tensor,
    best: Tensor,
    table: LookaheadTable | None = None,
    chunk: int = _CHUNK,
) -> None:
    """Writes the drafts of all slots, whose tokens are in `history` up to the last, and of which `table` has
    the tenants' earlier outputs.

    `active` [slots] bool and `records` [slots, RECORD_WORDS] int32 are the slots' state; slots that are not
    active, have a mask or whose request wants no drafts get none. `best` [slots] int32 of zeros is scratch
    space, and left as zeros. `chunk`: places that a program compares, a power of two. Raises ValueError for a
    history that is too long.
    """
    slots, length = history.tokens.shape
    if length >= _MOST_PLACES:
        raise ValueError(f"a history of {length} tokens a slot; {_MOST_PLACES - 1} can be searched")
    state = active, records, history.tokens, history.end, history.fixed, best
    if table is None or not table.alone:
        _scan[(slots, triton.cdiv(length, chunk))](
            *state, LENGTH=length, CHUNK=min(chunk, triton.next_power_of_2(length)), num_warps=8
        )
    shared = (best, best) if table is None else (table.cells, table.seeds)
    _propose[(slots,)](
        *state, drafts.tokens, drafts.count, drafts.tag, drafts.source, *shared, LENGTH=length,
        BUCKETS=0 if table is None else table.cells.shape[0], num_warps=1,
    )  # fmt: skip
