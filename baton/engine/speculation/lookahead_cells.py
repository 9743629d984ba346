"""Cells of the lookahead table: their format, their keys, and how they are filled and found. Torch-free.

A cell has 32 bytes, four words of 8:

    0   key ^ word 1 ^ word 2 ^ word 3
    1   ids 0 to 2, 21 bits each
    2   ids 3 to 5
    3   id 6, count (8 bits), stamp (16 bits)

The key is a hash of the last 7, 5 or 3 tokens, begun with a secret of their tenant, and says what the ids
are the continuation of. Steps read cells while others are written. A cell of which a reader sees some words
before and some after a write has, by its first word, a key that no context has: it is not found (Hyatt and
Mann, "A lock-less transposition table implementation for parallel search", ICGA Journal 25(1), 2002). Two
contexts have the same key with a chance of 2**-64, whosever they are.

A bucket of four cells is the only place of a key. Where a key comes again with the same continuation, its
count goes up, with another one down, and at 0 the continuation is replaced: of several the one remains that
most agree on (Boyer and Moore's majority vote). A key that is new takes the cell of its bucket that was not
touched for the longest time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.engine.shared_memory.step_shape import MOST_DRAFTS

WAYS = 4
CELL_WORDS = 4
CELL_BYTES = 8 * CELL_WORDS
BUCKET_BYTES = WAYS * CELL_BYTES
KEY_LENGTHS = (3, 5, 7)
"""Tokens that keys are of, in the order in which a context is filled in."""
ID_BITS = 21
NO_TOKEN = (1 << ID_BITS) - 1
"""Stands for the ids behind a text's end."""
IDS_A_WORD = 3
COUNT_SHIFT, MOST_COUNT = ID_BITS, 255
STAMP_SHIFT, STAMPS = ID_BITS + 8, 1 << 16
# The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
MIX_SHIFTS = 30, 27, 31
MIX_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
assert MOST_DRAFTS == 2 * IDS_A_WORD + 1

Words = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

_ID = np.uint64(NO_TOKEN)
_COUNT_SHIFT, _STAMP_SHIFT = np.uint64(COUNT_SHIFT), np.uint64(STAMP_SHIFT)
_ID_SHIFTS = np.arange(IDS_A_WORD, dtype=np.uint64) * np.uint64(ID_BITS)
_HALF = np.uint64(32)


def mixed(words: Words) -> Words:
    """A hash of each word, one to one."""
    first, second, third = (np.uint64(shift) for shift in MIX_SHIFTS)
    words = (words ^ (words >> first)) * np.uint64(MIX_FACTORS[0])
    words = (words ^ (words >> second)) * np.uint64(MIX_FACTORS[1])
    return words ^ (words >> third)


def keys_of(seed: int, text: Tokens, ends: Places) -> Words:
    """The keys of the contexts that end at these places of a text: [n, len(KEY_LENGTHS)], without meaning
    where a context would begin before the text. `seed`: of the text's tenant."""
    keys = np.full(len(ends), seed, dtype=np.uint64)
    found = np.empty((len(ends), len(KEY_LENGTHS)), dtype=np.uint64)
    for back in range(max(KEY_LENGTHS)):
        keys = mixed(keys ^ text[np.maximum(ends - back, 0)].astype(np.uint64))
        if back + 1 in KEY_LENGTHS:
            found[:, KEY_LENGTHS.index(back + 1)] = keys
    return found


def buckets_of(keys: Words, buckets: int) -> Places:
    """Maps each key to one of `buckets` buckets."""
    places: Places = (((keys >> _HALF) * np.uint64(buckets)) >> _HALF).astype(np.int64)
    return places


def continuations(text: Tokens, ends: Places) -> Words:
    """Packs the tokens that follow these places of a text: [n, CELL_WORDS - 1], words 1 to 3 of cells without
    count and stamp."""
    behind = ends[:, None] + 1 + np.arange(MOST_DRAFTS)
    ids = np.where(behind < len(text), text[np.minimum(behind, len(text) - 1)], NO_TOKEN).astype(np.uint64)
    ids = np.pad(ids, ((0, 0), (0, 2)))
    words: Words = (ids.reshape(len(ids), CELL_WORDS - 1, IDS_A_WORD) << _ID_SHIFTS).sum(-1, dtype=np.uint64)
    return words


def ids_of(words: Words) -> Tokens:
    """The ids of a cell's words 1 to 3, without those behind the text's end."""
    ids: Tokens = ((words[:, None] >> _ID_SHIFTS) & _ID).flatten()[:MOST_DRAFTS].astype(np.int32)
    known: Tokens = ids[ids != NO_TOKEN]
    return known


def counts_of(cells: Words) -> Words:
    """The counts of cells [..., CELL_WORDS], 0 for those that are empty."""
    return (cells[..., 3] >> _COUNT_SHIFT) & np.uint64(MOST_COUNT)


def find(cells: Words, keys: Words) -> Places:
    """The cells that have these keys: keys [n] and their buckets' cells [n, WAYS, CELL_WORDS] → [n], WAYS
    where there is none."""
    hits = (np.bitwise_xor.reduce(cells, axis=-1) == keys[:, None]) & (counts_of(cells) > 0)
    places: Places = np.where(hits.any(1), hits.argmax(1), WAYS)
    return places


def fill(cells: Words, keys: Words, words: Words, stamp: int) -> tuple[int, int]:
    """Fills in continuations, each in a bucket of its own: cells [n, WAYS, CELL_WORDS], which are changed;
    keys [n]; words [n, CELL_WORDS - 1]. Returns how many cells were empty, and of how many others the content
    was replaced. `stamp`: of this time, modulo STAMPS."""
    every, counts = np.arange(len(keys)), counts_of(cells)
    found = find(cells, keys)
    has = found < WAYS
    ages = (np.uint64(stamp) - (cells[..., 3] >> _STAMP_SHIFT)) % np.uint64(STAMPS)
    place = np.where(has, found, np.where(counts > 0, ages, np.uint64(STAMPS)).argmax(1))
    old, count = cells[every, place], counts[every, place]
    stored = old[:, 1:].copy()
    stored[:, 2] &= _ID
    same = has & (stored == words).all(1)
    votes = np.where(same, np.minimum(count + np.uint64(1), np.uint64(MOST_COUNT)), count - has)
    kept = has & (votes > 0)
    new = np.where(kept[:, None], stored, words)
    new[:, 2] |= np.where(kept, votes, np.uint64(1)) << _COUNT_SHIFT
    new[:, 2] |= np.uint64(stamp) << _STAMP_SHIFT
    cells[every, place, 0] = keys ^ np.bitwise_xor.reduce(new, axis=1)
    cells[every, place, 1:] = new
    return int((count == 0).sum()), int(((count > 0) & ~kept).sum())
