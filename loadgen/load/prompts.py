"""Synthetic prompts; the same number always gives the same prompt.

    random     uniformly drawn symbols: prompts share prefixes only by chance
    document   one of a few long documents, and a question of its own
    code       few different lines, repeated with small changes, which suits speculative decoding
    chat       like random; conversations have several turns by default

There are `num_prefixes` documents; other prompts may begin with one of as many shared prefixes, and the first
of a conversation with one of as many system prompts.
"""

from __future__ import annotations

import numpy as np

from loadgen.common.arrays import Integers
from loadgen.common.settings import PromptSettings
from loadgen.load.alphabet import Alphabet

# Each purpose has its own random stream, so that none changes when another is used more.
PREFIXES, DOCUMENTS, LINES, BLOCKS, SYSTEMS = 11, 12, 13, 14, 15

_DIFFERENT_LINES = 64
_LINE = (4, 16)
_CHANGED = 0.1


class PromptMaker:
    """Draws the symbols of prompts."""

    def __init__(self, prompts: PromptSettings, alphabet: Alphabet, seed: int) -> None:
        self._prompts = prompts
        self._alphabet = alphabet
        self._seed = seed
        self._lines = self._draw_lines() if prompts.dataset == "code" else []

    def symbols(self, random: np.random.Generator, tokens: int) -> Integers:
        """Enough symbols for `tokens` tokens."""
        prompts, cost = self._prompts, self._alphabet.cost
        wanted = -(-tokens // cost)
        if prompts.dataset == "document":
            shared = self._shared(random, DOCUMENTS, max(0, wanted - prompts.question_len // cost))
        else:
            shared = self._shared(random, PREFIXES, min(prompts.prefix_len, tokens) // cost)
        rest = wanted - len(shared)
        own = self._code(random, rest) if prompts.dataset == "code" else self._even(random, rest)
        return np.concatenate([shared, own])

    def system(self, random: np.random.Generator) -> Integers:
        """The symbols of a system prompt."""
        return self._shared(random, SYSTEMS, self._prompts.system_len // self._alphabet.cost)

    def block(self, name: int, tokens: int) -> Integers:
        """The symbols of a block of a trace: the same wherever its id occurs."""
        return self._even(
            np.random.default_rng([self._seed, BLOCKS, name]), -(-tokens // self._alphabet.cost)
        )

    def own(self, random: np.random.Generator, tokens: int) -> Integers:
        """Symbols for `tokens` tokens that no other prompt shares."""
        return self._even(random, -(-tokens // self._alphabet.cost))

    def _even(self, random: np.random.Generator, count: int) -> Integers:
        return random.integers(0, self._alphabet.size, count)

    def _shared(self, random: np.random.Generator, purpose: int, count: int) -> Integers:
        if count <= 0:
            return np.empty(0, np.int64)
        which = int(random.integers(self._prompts.num_prefixes))
        return self._even(np.random.default_rng([self._seed, purpose, which]), count)

    def _draw_lines(self) -> list[Integers]:
        random = np.random.default_rng([self._seed, LINES])
        lengths = random.integers(*_LINE, _DIFFERENT_LINES)
        return [self._even(random, int(length)) for length in lengths]

    def _code(self, random: np.random.Generator, count: int) -> Integers:
        parts: list[Integers] = []
        length = 0
        while length < count:
            line = self._lines[int(random.integers(len(self._lines)))]
            changed = random.random(len(line)) < _CHANGED
            parts.append(np.where(changed, self._even(random, len(line)), line))
            length += len(line)
        return np.concatenate([*parts, np.empty(0, np.int64)])[:count]
