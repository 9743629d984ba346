"""The lookahead table on the GPU, in the format of `baton.engine.speculation.lookahead_table`.

    probe   the keys of a slot's last 3, 5 and 7 tokens → what followed the longest one that is found
    fill    each place of an output that has ended → cells of its keys

A probe is part of the kernel that proposes drafts: three reads of a bucket, one cache line each, which do not
wait for one another. Filling is a kernel of its own, one program a place, on another stream than the steps'.
Programs do not wait for one another: where two fill cells of one bucket at the same time, one of them may be
lost or be found by no key (`lookahead_cells`), which costs a draft and changes no token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation import lookahead_cells as cells_
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_table import LookaheadTable, Output

_WAYS = tl.constexpr(cells_.WAYS)
_WORDS = tl.constexpr(cells_.CELL_WORDS)
_LONGEST = tl.constexpr(max(cells_.KEY_LENGTHS))
_SHORT, _MIDDLE = (tl.constexpr(length) for length in cells_.KEY_LENGTHS[:2])
_BITS = tl.constexpr(cells_.ID_BITS)
_ID = tl.constexpr(cells_.NO_TOKEN)
_A_WORD = tl.constexpr(cells_.IDS_A_WORD)
_COUNTED_ONCE = tl.constexpr(1 << cells_.COUNT_SHIFT)
_COUNT_SHIFT, _MOST_COUNT = tl.constexpr(cells_.COUNT_SHIFT), tl.constexpr(cells_.MOST_COUNT)
_STAMP_SHIFT, _STAMPS = tl.constexpr(cells_.STAMP_SHIFT), tl.constexpr(cells_.STAMPS)
_SHIFT0, _SHIFT1, _SHIFT2 = (tl.constexpr(shift) for shift in cells_.MIX_SHIFTS)
_FACTOR0, _FACTOR1 = (tl.constexpr(factor) for factor in cells_.MIX_FACTORS)
_IDS = tl.constexpr(MOST_DRAFTS)
_LANES = tl.constexpr(triton.next_power_of_2(MOST_DRAFTS))
assert len(cells_.KEY_LENGTHS) == 3


@triton.jit
def _mixed(word):
    word = (word ^ (word >> _SHIFT0)) * _FACTOR0
    word = (word ^ (word >> _SHIFT1)) * _FACTOR1
    return word ^ (word >> _SHIFT2)


@triton.jit
def _bucket(cells, key, BUCKETS: tl.constexpr):
    """The four words of each cell of a key's bucket, [ways] each, behind the bucket's address."""
    mine = cells + (((key >> 32) * BUCKETS) >> 32).to(tl.int64) * (_WAYS * _WORDS)
    at = mine + tl.arange(0, _WAYS) * _WORDS
    return mine, tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _way_of(key, word0, word1, word2, word3):
    """The cell that has a key; `_WAYS` where there is none."""
    way = tl.arange(0, _WAYS)
    full = ((word3 >> _COUNT_SHIFT) & _MOST_COUNT) > 0
    hit = full & ((word0 ^ word1 ^ word2 ^ word3).to(tl.uint64) == key)
    return tl.min(tl.where(hit, way, _WAYS), 0)


@triton.jit
def _of_way(word, way):
    return tl.sum(tl.where(tl.arange(0, _WAYS) == way, word, 0), 0)


@triton.jit
def _find(cells, key, length, ids, there, LENGTH: tl.constexpr, BUCKETS: tl.constexpr):
    """Replaces `length` and `ids` by a key's, where it is found."""
    _, word0, word1, word2, word3 = _bucket(cells, key, BUCKETS)
    way = _way_of(key, word0, word1, word2, word3)
    found = there & (way < _WAYS)
    lane = tl.arange(0, _LANES)
    in_second = tl.where(lane < 2 * _A_WORD, _of_way(word2, way), _of_way(word3, way))
    word = tl.where(lane < _A_WORD, _of_way(word1, way), in_second)
    these = (word >> (lane % _A_WORD * _BITS).to(tl.int64)) & _ID
    return tl.where(found, LENGTH, length), tl.where(found, these, ids)


@triton.jit
def probe(cells, seeds, slot, row, predicted, ended, ring, kept, wanted, BUCKETS: tl.constexpr):
    """Looks the last tokens of a slot's text up in the table. → the length of the longest key that is found,
    0 where none is; how many ids followed it; and these [lanes] int64.

    `row`: of the history, with the text in its ring from `predicted` on, of which it has the last `kept` of
    `ended` tokens. `wanted`: whether the slot may have drafts.
    """
    seed = tl.load(seeds + slot)
    wanted = wanted & (seed != 0)
    key = seed.to(tl.uint64)
    length = 0
    ids = tl.full((_LANES,), _ID, tl.int64)
    for back in tl.static_range(_LONGEST):
        last = tl.load(row + predicted + tl.maximum(ended - 1 - back, 0) % ring)
        key = _mixed(key ^ last.to(tl.uint64))
        if (back + 1 == _SHORT) | (back + 1 == _MIDDLE) | (back + 1 == _LONGEST):
            length, ids = _find(cells, key, length, ids, wanted & (kept > back), back + 1, BUCKETS)
    known = (ids != _ID) & (tl.arange(0, _LANES) < _IDS)
    return length, tl.sum(known.to(tl.int32), 0), ids


@triton.jit
def _vote(cells, counts, key, new1, new2, new3, stamp, BUCKETS: tl.constexpr):
    """Fills in a continuation; `new3` has neither count nor stamp."""
    bucket, word0, word1, word2, word3 = _bucket(cells, key, BUCKETS)
    way = tl.arange(0, _WAYS)
    used = ((word3 >> _COUNT_SHIFT) & _MOST_COUNT) > 0
    age = (stamp - (word3 >> _STAMP_SHIFT)) & (_STAMPS - 1)
    age = tl.where(used, age, _STAMPS)
    oldest = tl.min(tl.where(age == tl.max(age, 0), way, _WAYS), 0)
    found = _way_of(key, word0, word1, word2, word3)
    has = found < _WAYS
    place = tl.where(has, found, oldest)
    old1, old2, old3 = _of_way(word1, place), _of_way(word2, place), _of_way(word3, place)
    count = (old3 >> _COUNT_SHIFT) & _MOST_COUNT
    same = has & (old1 == new1) & (old2 == new2) & ((old3 & _ID) == new3)
    votes = tl.where(same, tl.minimum(count + 1, _MOST_COUNT), count - 1)
    keeps = has & (votes > 0)
    new1 = tl.where(keeps, old1, new1)
    new2 = tl.where(keeps, old2, new2)
    new3 = tl.where(keeps, (old3 & _ID) | (votes << _COUNT_SHIFT), new3 | _COUNTED_ONCE)
    new3 = new3 | (stamp << _STAMP_SHIFT)
    cell = bucket + place * _WORDS
    tl.store(cell, (key ^ (new1 ^ new2 ^ new3).to(tl.uint64)).to(tl.int64))
    tl.store(cell + 1, new1)
    tl.store(cell + 2, new2)
    tl.store(cell + 3, new3)
    tl.atomic_add(counts, 1, mask=count == 0, sem="relaxed")
    tl.atomic_add(counts + 1, 1, mask=(count > 0) & (keeps == 0), sem="relaxed")


@triton.jit(do_not_specialize=["slot", "first", "end", "stamp"])
def _fill(
    cells, seeds, counts, tokens, history_end, fixed, slot, first, end, stamp,
    LENGTH: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    predicted = tl.load(fixed + slot)
    ended = tl.load(history_end + slot)
    ring = LENGTH - predicted
    oldest = tl.maximum(ended - ring, 0)
    end = tl.minimum(end, ended)
    place = first + tl.program_id(0)
    if (place < oldest) | (place >= end - 1):
        return
    row = tokens + slot.to(tl.int64) * LENGTH + predicted
    lane = tl.arange(0, _LANES)
    behind = place + 1 + lane
    is_id = (lane < _IDS) & (behind < end)
    ids = tl.load(row + behind % ring, mask=is_id, other=_ID).to(tl.int64)
    ids = tl.where(lane < _IDS, ids, 0) << (lane % _A_WORD * _BITS).to(tl.int64)
    new1 = tl.sum(tl.where(lane < _A_WORD, ids, 0), 0)
    new2 = tl.sum(tl.where((lane >= _A_WORD) & (lane < 2 * _A_WORD), ids, 0), 0)
    new3 = tl.sum(tl.where(lane >= 2 * _A_WORD, ids, 0), 0)
    key = tl.load(seeds + slot).to(tl.uint64)
    stamp = stamp.to(tl.int64)
    for back in tl.static_range(_LONGEST):
        last = tl.load(row + tl.maximum(place - back, 0) % ring)
        key = _mixed(key ^ last.to(tl.uint64))
        is_key = (back + 1 == _SHORT) | (back + 1 == _MIDDLE) | (back + 1 == _LONGEST)
        if is_key & (place - back >= oldest):
            _vote(cells, counts, key, new1, new2, new3, stamp, BUCKETS)


def fill_table(
    table: LookaheadTable, history: History, output: Output, *, places_at_once: int | None = None
) -> None:
    """Fills the table with an output from its slot's history, on the current stream. `places_at_once`: None:
    all; with 1 the cells are those of the table's twin, bit for bit."""
    places = max(output.end - 1 - output.first, 1)
    at_once = places_at_once or places
    for first in range(0, places, at_once):
        _fill[(min(at_once, places - first),)](
            table.cells, table.seeds, table.counts, history.tokens, history.end, history.fixed,
            output.slot, output.first + first, output.end, output.stamp,
            LENGTH=history.length, BUCKETS=table.cells.shape[0], num_warps=1,
        )  # fmt: skip
