"""How long a worker's output tokens take, compared with what was predicted for them.

A worker reports the durations of its steps. What a client sees between two tokens is longer by what lies in
between, and a step's duration is not quite linear in what it computes, which predictions take it to be.
"""

from __future__ import annotations

from services.router.workers.recent_mean import REQUESTS, RecentMean

# What a single request may say at most: some are stalled, or their clients' connections are.
_LEAST, _MOST = 0.8, 1.25


class TpotRatio(RecentMean):
    """The ratio of measured to predicted time per output token, of recent requests that ended at a worker; 1
    counts as some of the first ones."""

    def __init__(self) -> None:
        super().__init__(1.0, REQUESTS // 8)

    def ended(self, measured_s: float, predicted_s: float) -> None:
        """A request had a token every `measured_s` seconds on average, where `predicted_s` (above 0) were
        predicted."""
        self.observe(min(_MOST, max(_LEAST, measured_s / predicted_s)))
