"""What requests are checked against: the served model's name and its limits at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """A snapshot. `vocab_size` and `max_context_tokens` may change as workers join and leave."""

    served_name: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context_tokens: int
