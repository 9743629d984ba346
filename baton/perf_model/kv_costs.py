"""Bytes of a worker's KV cache, and the seconds that moving them takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What a handoff adds to a sequence's first decode step, in seconds: measured 0.5 to 0.9 ms between GPUs of
# one host.
HANDOFF_S = 0.002


@dataclass(frozen=True, slots=True)
class KvCosts:
    """`token_bytes`: of a token's KV on all GPUs of the worker. `memory_bytes`: of its KV cache, likewise.
    `link_bytes_s`: bytes a second that it sends to a decode worker."""

    token_bytes: float
    memory_bytes: float = math.inf
    link_bytes_s: float = math.inf

    def holds(self, tokens: float) -> bool:
        """True if the cache has room for `tokens` tokens of all sequences together."""
        return tokens * self.token_bytes <= self.memory_bytes

    def transfer_bytes(self, tokens: float) -> float:
        """Bytes of a handoff of `tokens` tokens."""
        return tokens * self.token_bytes

    def transfer_s(self, tokens: float) -> float:
        """Seconds that a handoff of `tokens` tokens occupies the link."""
        return self.transfer_bytes(tokens) / self.link_bytes_s
