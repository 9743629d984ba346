"""Token ids for steps that are warmed up or measured before there is a request. Torch-free.

The same token in every row would be a best case that no traffic has: all rows of a product are alike, which
takes a GPU less power, and all are routed to the same experts.
"""

from __future__ import annotations

import random

_SEED = 0


def random_tokens(vocab_size: int, count: int) -> list[int]:
    """`count` ids of the vocabulary, the same at every start."""
    return random.Random(_SEED).choices(range(vocab_size), k=count)
