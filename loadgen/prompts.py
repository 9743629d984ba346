"""What is sent: prompts of token ids, so that the length is exact and no tokenizer is needed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def random_token_ids(length: int, count: int, vocab_size: int, seed: int) -> Iterator[list[int]]:
    """`count` prompts of `length` ids, uniform below `vocab_size`; no two share a prefix but by chance."""
    random = np.random.default_rng([seed, 1])
    for _ in range(count):
        yield random.integers(0, vocab_size, length).tolist()
