"""Prompts that several tenants send alike, and what a tenant's own requests have put into a prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

# Texts of so many blocks, of which a prompt has the first few and a tail. A tenant sends several prompts of
# a text before it goes on to later ones, so that there are always some that others have sent and it has not.
MOST_BLOCKS = 4
_PROMPTS_OF_A_TEXT = 5
_SPREAD = 8


@dataclass(frozen=True)
class Prompt:
    """`chain`: its full blocks, each by its text and place."""

    token_ids: list[int]
    chain: tuple[tuple[int, int], ...]


@dataclass
class OwnCache:
    """Blocks that a tenant's own requests have left in a cache with room for everything."""

    blocks: set[tuple[int, int]] = field(default_factory=set)

    def held(self, prompt: Prompt) -> int:
        """The number of the prompt's first blocks that are there."""
        held = 0
        while held < len(prompt.chain) and prompt.chain[held] in self.blocks:
            held += 1
        return held

    def add(self, prompt: Prompt) -> None:
        """Adds the blocks of a prompt that was computed."""
        self.blocks.update(prompt.chain)


def prompts(seed: int, count: int, block_tokens: int, vocab_size: int) -> Iterator[Prompt]:
    """A tenant's prompts, in its own order. No prompt ends at a block's boundary, nor one token before it."""
    draw = random.Random(seed)
    for number in range(count):
        text = number // _PROMPTS_OF_A_TEXT + draw.randrange(_SPREAD)
        blocks = draw.randint(1, MOST_BLOCKS)
        tail = [draw.randrange(vocab_size) for _ in range(draw.randint(1, block_tokens - 2))]
        words = random.Random(text)
        ids = [words.randrange(vocab_size) for _ in range(MOST_BLOCKS * block_tokens)]
        yield Prompt(ids[: blocks * block_tokens] + tail, tuple((text, place) for place in range(blocks)))
