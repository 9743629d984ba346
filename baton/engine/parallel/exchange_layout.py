"""The layout of the memory that a worker's devices share, and the arguments of the exchange's kernels
(`exchange.cu`, which has the same numbers). Torch-free.

An arena, one a device, at the same places on each:

    0         steps, solo        128       error        256 + 128 · r     flag of rank r
    inboxes   2 × the rows of a step, as the first device sends them
    parts     3 × [rows, width], what this rank adds to a sum
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

MOST_RANKS = 8
STEPS_AT, SOLO_AT, ERROR_AT = 0, 8, 128
RECORD_WORDS = 5
# Two would do between nodes that begin when the one before has ended; one more for launches that overlap.
GENERATIONS = 3
_FLAGS_AT, _LINE = 256, 128
_INBOXES = 2
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """Numbers and sizes of a step's exchange. `sums`: reduce nodes of a step, two a layer; `rows` of them at
    most; `width` of a row, in elements of `element_bytes`; `words`: 32-bit words of a step's rows, the first
    of which is their number."""

    ranks: int
    sums: int
    rows: int
    width: int
    element_bytes: int
    words: int

    @property
    def nodes(self) -> int:
        """Nodes of a step: its begin, its sums, its end."""
        return self.sums + 2

    @property
    def last_node(self) -> int:
        """The number of the node that ends a step."""
        return self.sums + 1

    @property
    def part_bytes(self) -> int:
        """Bytes of a rank's part of a sum."""
        return self.rows * self.width * self.element_bytes

    @property
    def inboxes_at(self) -> int:
        """Offset of the rows of steps in an arena."""
        return _FLAGS_AT + MOST_RANKS * _LINE

    @property
    def arena_bytes(self) -> int:
        """Bytes of a rank's arena."""
        return self._parts_at + GENERATIONS * _aligned(self.part_bytes)

    def flag_at(self, rank: int) -> int:
        """Offset of a rank's flag in an arena."""
        return _FLAGS_AT + rank * _LINE

    def part_at(self, node: int) -> int:
        """Offset of the parts of a sum in an arena, by its number in the step, from 1. Raises ValueError for
        what is no sum.

        The parts of a sum may be written while other ranks still read those of the sum before. The end and
        the begin of a step, which wait for all ranks, stand between the last sum of one and the first of the
        next.
        """
        if not 1 <= node <= self.sums:
            raise ValueError(f"node {node} is none of {self.sums} sums")
        return self._parts_at + node % GENERATIONS * _aligned(self.part_bytes)

    @property
    def _parts_at(self) -> int:
        return self.inboxes_at + _aligned(_INBOXES * self.words * 4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Ranks(ctypes.Structure):
    """All ranks as one of them sees them: the first argument of each node."""

    _fields_ = (
        ("arenas", ctypes.c_uint64 * MOST_RANKS),
        ("records", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("nodes", ctypes.c_uint32),
    )


class BeginArguments(ctypes.Structure):
    """The argument of the kernel `begin_step`."""

    _fields_ = (
        ("sent", ctypes.c_uint64),
        ("received", ctypes.c_uint64),
        ("inboxes", ctypes.c_uint64),
        ("words", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class ReduceArguments(ctypes.Structure):
    """The argument of the kernel `reduce_rows`."""

    _fields_ = (
        ("parts", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("post_gains", ctypes.c_uint64),
        ("gains", ctypes.c_uint64),
        ("normed", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("post_eps", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("node", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class EndArguments(ctypes.Structure):
    """The argument of the kernel `end_step`."""

    _fields_ = (
        ("part", ctypes.c_uint64),
        ("logits", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64),
        ("whole", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("part_bytes", ctypes.c_uint32),
        ("row_bytes", ctypes.c_uint32),
        ("part_at", ctypes.c_uint32),
        ("node", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class PatternArguments(ctypes.Structure):
    """The argument of `write_pattern` and `check_pattern`."""

    _fields_ = (
        ("words", ctypes.c_uint64),
        ("wrong", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


Argument = Ranks | BeginArguments | ReduceArguments | EndArguments | PatternArguments
"""A kernel's argument, passed by value."""
