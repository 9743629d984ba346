"""When requests are sent: generators of absolute times, which know nothing of sending.

Open loop: a time depends on nothing that the server does, so a slow server cannot slow its own load.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def poisson(rate: float, count: int, seed: int) -> Iterator[float]:
    """`count` times in seconds from the start, gaps exponential with mean 1/`rate`, the first at once."""
    random = np.random.default_rng([seed, 0])
    now = 0.0
    for _ in range(count):
        yield now
        now += random.exponential(1.0 / rate)
