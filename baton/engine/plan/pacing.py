"""Paces the prefill steps of a worker that decodes too, so that its streams keep their time per output token.

Decode steps that end have earned their limit, for each token that they gave a sequence; the time that passes
while sequences are decoded is spent. While no more is spent than earned, prefill steps may begin; a prefill
step slows the decode steps beside it, and the next one waits until what they spent in addition is earned
again. So the mean step takes the limit at most, prompts get what that leaves, and where no decode step takes
as long, nothing is held back. Prompts get an eighth of the time in any case: a limit that cannot be met
starves none.

Prefill steps that decode steps are part of may run one right behind the other as long as no more is spent
than earned; without a limit a decode step runs between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

# Bound on the time credit or debt, in decode steps: a short while beside a request of some hundred tokens.
_MOST_STEPS = 32
# Credit that prefill steps in a row may spend, in decode steps: sequences that begin then have earned
# nothing.
_MOST_STREAK_STEPS = 4
# The least share of the time that prompts get, as 1 / (1 + this).
_LEAST_PAUSE = 7


@dataclass(eq=False)
class PrefillPacing:
    """The pacing of a worker's prefill steps. `limit_s` returns the seconds that a token of a sequence may
    take on average; infinite: as long as it likes."""

    limit_s: Callable[[], float] = lambda: math.inf
    # Whether all that is decoded has a limit.
    all_limited: Callable[[], bool] = lambda: True
    # Tokens that a decode step gives a sequence.
    tokens_a_step: Callable[[], float] = lambda: 1.0
    _earned_s: float = field(default=0.0, init=False)
    _steps: int = field(default=0, init=False)
    _looked_at: float = field(default=0.0, init=False)
    # When a prefill step may begin whatever is owed.
    _due_at: float = field(default=0.0, init=False)
    # What prefill steps spend, beyond the limit, that ran one behind the other.
    _streak_s: float = field(default=0.0, init=False)

    def look(self, now: float, steps: int, *, decoding: bool) -> None:
        """Updates the time credit: `steps` decode steps have ended so far, and `decoding` says whether any
        sequence is decoded. To be called once per loop iteration."""
        limit_s = self.limit_s()
        ended, spent = steps - self._steps, now - self._looked_at
        self._steps, self._looked_at = steps, now
        if not decoding or math.isinf(limit_s):
            self._earned_s = 0.0
            return
        earned = ended * limit_s * self.tokens_a_step()
        most = _MOST_STEPS * limit_s
        self._earned_s = min(most, max(-most, self._earned_s + earned - spent))

    def may_begin(self, now: float) -> bool:
        """Returns whether a prefill step may begin now."""
        return self._earned_s >= 0 or now >= self._due_at

    def begun(self, now: float, expected_s: float, *, behind: bool = False) -> bool:
        """Charges a launched prefill step of `expected_s`; `behind`: behind another one that runs, and whose
        decode step has not ended. Returns True if another may run right behind it, if both decode, too."""
        self._due_at = now + (1 + _LEAST_PAUSE) * expected_s
        limit_s = self.limit_s()
        if math.isinf(limit_s) or not self.all_limited():
            return False
        more_s = expected_s - limit_s
        self._streak_s = (self._streak_s if behind else 0.0) + max(0.0, more_s)
        earned_s = self._earned_s + (limit_s if behind else 0.0)
        return self._streak_s + more_s <= _MOST_STREAK_STEPS * limit_s and earned_s >= 2 * more_s
