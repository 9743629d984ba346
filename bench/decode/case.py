"""Settings of one run of `bench.decode`, and its arithmetic: lower bounds, bytes, sizes. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bench.precision import Precision
from bench.shapes import SHAPES, Shape

# Output tokens over which a step's time is taken, as vLLM's figures were.
FIRST, LAST = 33, 160
# A large batch is admitted over several steps; each of its sequences lives that much longer.
SPARE = 18
BLOCK_TOKENS = 64
# More than an H200 reads from its memory. What a GPU really reads is measured (`bench.read_bandwidth`).
MOST_READ_BYTES_S = 5e12
# Kept free beside weights and KV: logits, graphs, the driver's own.
RESERVE_BYTES = 3.0e9

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
    "logprobs": {"logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run's settings, which its output repeats."""

    shape: str
    precision: Precision
    batch: int
    context: int
    sampling: str
    numerics: str

    @property
    def model(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return round(self.model.kv_elements() * self.model.kv_element_bytes(self.precision))

    def floor_ms(self, mean_context: float, read_bytes_s: float, rows: float | None = None) -> float:
        """The lower bound of a step's time: the bytes that it must read, at the memory's bandwidth."""
        of_rows = (self.batch if rows is None else rows) * self.model.kv_elements_read(mean_context)
        read = self.model.weight_bytes(self.precision) + of_rows * self.model.kv_element_bytes(self.precision)
        return read / read_bytes_s * 1e3


@dataclass(frozen=True, slots=True)
class EngineSize:
    """What an engine is built for: slots, tokens per slot, and additional blocks."""

    slots: int
    tokens: int
    spare: int = 0

    @classmethod
    def steady(cls, cases: list[Case], seconds: float | None) -> EngineSize:
        """For batches that decode `LAST` tokens, or as many as fit into `seconds` at the lower bound."""
        first = cases[0]
        output = LAST
        if seconds is not None:
            least_ms = min(case.floor_ms(case.context, MOST_READ_BYTES_S) for case in cases)
            output = LAST + math.ceil(seconds * 1e3 / least_ms)
        return cls(max(case.batch for case in cases), first.context + output + SPARE + 1)

    def blocks(self) -> int:
        """Blocks of one cache group, including scratch."""
        return 1 + self.slots * -(-self.tokens // BLOCK_TOKENS) + self.spare

    def kv_bytes(self, case: Case) -> int:
        return self.blocks() * BLOCK_TOKENS * case.token_bytes

    def lacking(self, case: Case, free_bytes: float) -> str | None:
        """Why an engine of this size does not fit into the free memory; None if it fits."""
        weights = case.model.held_bytes(case.precision)
        wanted = weights + self.kv_bytes(case) + RESERVE_BYTES
        if wanted <= free_bytes:
            return None
        return (
            f"{self.slots} sequences of {self.tokens} tokens want {self.kv_bytes(case) / 1e9:.1f} GB of KV "
            f"beside {weights / 1e9:.1f} GB of weights and {RESERVE_BYTES / 1e9:.0f} GB for the rest; "
            f"{free_bytes / 1e9:.1f} GB are free"
        )
