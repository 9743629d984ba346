"""Bounds what one rendering of a chat template may take.

A template is a program that comes with a checkpoint, and what it costs depends on what clients send. The time
is checked between its steps; what a single step would build is computed before it is built, since nothing
can interrupt the interpreter while it copies a text.
"""

from __future__ import annotations

import time

# Processor time of the rendering thread, in seconds.
MAX_CPU_S = 1.0
# A prompt's text, in bytes; also what a single step may build, in characters.
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
# All texts and lists that a rendering builds on its way, in characters.
MAX_BUILT = 256 * 1024 * 1024
# Steps, and characters, after which the clock is read.
_STEPS = 32
_CHARS = 1024 * 1024
# Values whose sizes are kept.
_MOST_KEPT = 64
# Characters that a number, or a list's place for an item, counts as.
_ITEM = 8


class TooExpensiveError(Exception):
    """The rendering exceeds a bound, which the message names."""


def check_output(chars: int) -> None:
    """Raises TooExpensiveError if neither a prompt nor a single step may have `chars` characters."""
    if chars > MAX_OUTPUT_BYTES:
        raise TooExpensiveError(f"writes more than {MAX_OUTPUT_BYTES // 1024**2} MB")


class RenderBudget:
    """The budget left to a rendering. Belongs to one thread, whose processor time it measures."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_CPU_S
        self._built = 0
        self._steps = 0
        self._chars = 0
        # By id, of values that were measured lately: the value, which keeps the id its own, and its size.
        self._sizes: dict[int, tuple[object, int]] = {}

    def step(self, chars: int = 0) -> None:
        """Counts a step that builds `chars` characters. Raises TooExpensiveError."""
        self._steps += 1
        self._chars += chars
        if self._steps >= _STEPS or self._chars >= _CHARS:
            self._built += self._chars
            self._steps = self._chars = 0
            if self._built > MAX_BUILT:
                raise TooExpensiveError("needs too much memory")
            if time.thread_time() > self._deadline:
                raise TooExpensiveError(f"takes more than {MAX_CPU_S:g} s of processor time")

    def size(self, value: object) -> int:
        """The characters of a value with everything in it, as often as it is in it: a list that holds
        another one twice has twice its size."""
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return _ITEM
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        self.step()
        size = sum(map(self.size, value)) + _ITEM * len(value)
        if isinstance(value, dict):
            size += sum(map(self.size, value.values()))
        self.note_size(value, size)
        return size

    def note_size(self, value: object, size: int) -> None:
        """Notes the size of a list, tuple or dictionary. Raises TooExpensiveError if it is too large."""
        check_output(size)
        if len(self._sizes) >= _MOST_KEPT:
            self._sizes.clear()
        self._sizes[id(value)] = (value, size)

    def built(self, value: object) -> None:
        """Counts a value that a step has built. Raises TooExpensiveError."""
        if isinstance(value, str | bytes):
            self.step(len(value))
        elif isinstance(value, list | tuple | dict):
            self.size(value)
            self.step(_ITEM * len(value))
        else:
            self.step()
