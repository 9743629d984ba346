"""What requests are judged by: the served model's limits, as of now."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.request import sizes


@dataclass(frozen=True)
class Model:
    """What requests are judged by; `vocab_size` and `context` may become less while workers come and go."""

    served_name: str
    eos: tuple[int, ...]
    vocab_size: int
    context: int

    @property
    def most_listed(self) -> int:
        """Tokens that /tokenize and /detokenize take or give at most."""
        return max(self.context, sizes.MAX_LISTED_TOKENS)
