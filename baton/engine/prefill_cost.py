"""What a chunk of a prompt costs, and how long a step of such chunks takes. Torch-free.

A token costs 1, and as much again for every `half_context` tokens that it attends to. A model's arithmetic
says where that is: its products take 2 operations a weight and token, its attention 4 a layer, query head
dimension and token attended to. How long a unit takes is measured while the worker runs.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from baton.engine.model_config import ModelConfig

# The pace is the median of so many measured steps: the first of all compiles, and a host has slow moments.
_STEPS_KEPT = 9


def half_context(config: ModelConfig) -> float:
    """Tokens of context at which attention takes as long as the products."""
    width = config.num_heads * config.head_dim
    key_values = 2 * config.num_kv_heads * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    weights = config.hidden_size * (2 * width + key_values) + mlp
    return weights / (2 * width)


class PrefillCost:
    """Units of chunks, and seconds a unit."""

    def __init__(self, half_context: float = math.inf) -> None:
        self._half_context = half_context
        self._paces: deque[float] = deque(maxlen=_STEPS_KEPT)

    def of(self, start: int, count: int) -> float:
        """Units of tokens `start` to `start + count` of a sequence."""
        return count + count * (start + count / 2) / self._half_context

    def tokens_within(self, start: int, units: float) -> int:
        """The most tokens from `start` on that cost at most `units`."""
        if math.isinf(self._half_context) or math.isinf(units):
            return int(min(units, 2**31))
        slope = 1 + start / self._half_context
        root = math.sqrt(slope * slope + 2 * units / self._half_context)
        return int(self._half_context * (root - slope))

    def units_within(self, seconds: float) -> float:
        """The units that take so long; no bound before anything was measured."""
        pace = median(self._paces) if self._paces else 0.0
        return seconds / pace if pace > 0 else math.inf

    def seconds_of(self, units: float) -> float:
        """How long they should take; 0 before anything was measured."""
        return units * median(self._paces) if self._paces else 0.0

    def took(self, units: float, seconds: float) -> None:
        """Work of `units` took so long."""
        if units > 0:
            self._paces.append(seconds / units)
