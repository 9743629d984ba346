"""Seconds of one worker's steps, prompts and output tokens, from a few numbers.

A prefill step of `rows` prompt tokens takes

    max(prefill_step_s, rows * prefill_token_s) + attention,

where a row's attention takes as long as its products (`prefill_token_s`) for every `prefill_half_context`
tokens that it attends to. A decode step reads the weights once, which takes the same for few sequences as for
many; each sequence adds a little arithmetic, and each token of context its KV:

    decode_step_s + decode_curve(rows) + sequences * decode_sequence_s
        + context tokens * decode_context_token_s

A GPU's steps are of padded batches, so they take longer by jumps: that is `decode_curve`. A step that has
both takes the sum. All are means; 0 where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from baton.perf_model.curve import NO_CURVE, Curve

# (first position, rows) of a chunk of a prompt.
Chunk = tuple[int, int]
# What a handoff adds to a sequence's first decode step, in seconds: measured 0.5 to 0.9 ms between GPUs of
# one host.
HANDOFF_S = 0.002
# A batch is padded as if up to this many more sequences were admitted before it runs.
_MORE = 2


def attended(start: int, count: float) -> float:
    """Sum over `count` rows from position `start` on of the tokens that each attends to."""
    return count * (start + count / 2)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of one worker, in seconds and tokens (the formulas are in this module's docstring).

    `tokens_a_step`: tokens that a decode step gives each of its sequences on average, or most of them;
    `rows_a_sequence`: rows that it has for each, those of its drafts included. `prompt_curve`: measured
    seconds of whole prompts by their tokens, attention included, instead of the formula.
    """

    prefill_token_s: float = 0.0
    prefill_step_s: float = 0.0
    prefill_half_context: float = math.inf
    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_context_token_s: float = 0.0
    decode_curve: Curve = NO_CURVE
    tokens_a_step: float = 1.0
    rows_a_sequence: float = 1.0
    prompt_curve: Curve | None = None

    @classmethod
    def of_batches(
        cls, batches: Sequence[int], seconds: Sequence[float], context_token_s: float = 0.0
    ) -> Self:
        """Decode costs from `seconds` of steps without contexts that are padded to `batches` rows, ascending;
        a step that takes less than a smaller one counts as that one. Where few places of a batch are left, a
        step may be padded to the next size already, for sequences that are admitted before it runs: there the
        curve begins to rise. `context_token_s`: seconds to read the KV of a token."""
        at, values, before = [1.0], [seconds[0]], 0
        for batch, took in zip(batches, accumulate(seconds, max), strict=True):
            more = min(_MORE, (batch - before) / 2)
            if values[-1] < took:
                at.append(before + 1.0)
                values.append(took)
            if batch - more > at[-1]:
                at.append(batch - more)
                values.append(took)
            before = batch
        curve = Curve(tuple(at), tuple(value - seconds[0] for value in values))
        return cls(decode_step_s=seconds[0], decode_context_token_s=context_token_s, decode_curve=curve)

    def prompt_s(self, tokens: float, cached: int = 0) -> float:
        """Seconds of a prompt of `tokens` tokens by itself, of which the first `cached` need no computing."""
        count = max(1, tokens - cached)
        if self.prompt_curve is not None:
            return self.prompt_curve.extended(count)
        return self.prefill_s(((cached, count),))

    def prefill_s(self, chunks: Iterable[tuple[int, float]]) -> float:
        """Seconds of one prefill step of these chunks."""
        rows = context = 0.0
        for start, count in chunks:
            rows += count
            context += attended(start, count)
        token_s = self.prefill_token_s
        attention = token_s * context / self.prefill_half_context
        return max(self.prefill_step_s, rows * token_s) + attention

    def decode_s(self, sequences: float, context_tokens: float, rows: float | None = None) -> float:
        """Seconds of a decode step of `sequences` with `context_tokens` together, at least `decode_step_s`.
        `rows`: of its batch; None: `rows_a_sequence` for each."""
        more_s = (
            self.decode_curve.value(sequences * self.rows_a_sequence if rows is None else rows)
            + sequences * self.decode_sequence_s
            + context_tokens * self.decode_context_token_s
        )
        return self.decode_step_s + more_s if more_s > 0 else self.decode_step_s

    def token_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds from one token of a sequence to the next."""
        return self.decode_s(sequences, context_tokens) / self.tokens_a_step

    def each_s(self, context_tokens: float) -> float:
        """Seconds by which a sequence of `context_tokens` makes the time from a token to the next longer, on
        average over the curve."""
        rows_s = self.rows_a_sequence * self.decode_curve.slope
        context_s = context_tokens * self.decode_context_token_s
        return (rows_s + self.decode_sequence_s + context_s) / self.tokens_a_step

    @property
    def shared_s(self) -> float:
        """Seconds of the time from a token to the next that all sequences share."""
        return self.decode_step_s / self.tokens_a_step

    def times(self, rows: float) -> float:
        """Ratio of the part of a decode step that all its rows share to the same part of a step of one
        row."""
        return 1.0 + self.decode_curve.value(rows) / self.decode_step_s if self.decode_step_s else 1.0
