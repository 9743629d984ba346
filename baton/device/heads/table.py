"""The table of a move between whole blocks and the heads that several devices have: what a kernel reads when
it runs, in memory of the host that the device reaches. Torch-free.

    blocks, begin, end, initial sum, runs a block, 0      `begin`, `end`: words of every whole block
    block, place                                          for each: its number, and where its `begin` is among
                                                          the words of whole blocks
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

HEADER_WORDS = 6
# Fields of a run on the device: first word in block 0, words from block to block, word of a whole block,
# length. Padding, which is on no device, has no words from block to block.
RUN_WORDS = 4
_HEADER = struct.Struct("<3qQ2q")
_BLOCK = struct.Struct("<2q")


def table_words(blocks: int) -> int:
    """int64 elements of a table for up to `blocks` blocks; a whole number of 16 bytes."""
    return HEADER_WORDS + 2 * blocks


def write_table(
    target: memoryview,
    at: int,
    blocks: Sequence[int],
    words: range,
    places: Sequence[int],
    runs: int,
    initial: int = 0,
) -> None:
    """Writes a table to byte `at` of `target`. `words`: of every whole block that are moved; `places`: of
    each block; `runs`: of a block; `initial`: what the sum of all words begins with, in [0, 2^64)."""
    for number, (block, place) in enumerate(zip(blocks, places, strict=True)):
        _BLOCK.pack_into(target, at + _HEADER.size + number * _BLOCK.size, block, place)
    _HEADER.pack_into(target, at, len(blocks), words.start, words.stop, initial, runs, 0)
