"""What clients of one process have received."""

from __future__ import annotations

from dataclasses import dataclass, field

# More times to the first token are not kept.
_MOST_TTFTS = 100_000


@dataclass(slots=True)
class Counts:
    """Since the last reset. `messages`: with tokens. `ttft_ms`: from a request's send to its first token."""

    tokens: int = 0
    messages: int = 0
    requests: int = 0
    failed: int = 0
    ttft_ms: list[float] = field(default_factory=list)

    def first_token(self, after_ms: float) -> None:
        """Notes the time to a request's first token."""
        if len(self.ttft_ms) < _MOST_TTFTS:
            self.ttft_ms.append(after_ms)
