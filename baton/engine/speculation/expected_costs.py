"""Expected costs of steps with other numbers of sequences than run, where a policy chooses rows for drafts.
Torch-free.

`StepCosts` has one number of rows a sequence, and one of tokens a step. With a policy both depend on how many
sequences there are: a single one has seven drafts, and on a full worker none has any. So its curve is made
over sequences here: `token_s` is the time of steps with the rows that the policy would choose, over the
tokens that these would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from baton.perf_model.curve import Curve
from baton.perf_model.step_costs import StepCosts

Expected = Callable[[int], tuple[int, float]]
"""A function from a number of sequences to the rows that a step of that number should have, and the tokens
that it should give each on average."""


def costs_by_sequences(
    costs: StepCosts,
    expected: Expected,
    numbers: Sequence[int],
    *,
    ran: int,
    tokens_a_step: float,
    context_tokens: float,
) -> StepCosts:
    """`costs` by rows → by sequences, of which `decode_s` is no time of a step any more, but `token_s` is
    right for sequences of about `context_tokens`.

    `numbers`: of sequences, ascending, for which the curve has points; `ran`: sequences of the latest steps,
    which gave most of them `tokens_a_step`. Where these are less than expected of the mean, so are those of
    other numbers of sequences.
    """
    mean = expected(ran)[1]
    share = (tokens_a_step - 1) / (mean - 1) if mean > 1 else 1.0

    def step_s(sequences: int) -> float:
        """Returns the seconds of a step that, over `tokens_a_step`, are the time between two tokens."""
        rows, tokens = expected(sequences)
        seconds = costs.decode_s(sequences, sequences * context_tokens, rows)
        return seconds * tokens_a_step / (1 + share * (tokens - 1))

    each_s = costs.decode_sequence_s + context_tokens * costs.decode_context_token_s
    # More sequences are never expected to be faster.
    totals = list(accumulate(map(step_s, numbers), max))
    shared = [totals[n] - number * each_s for n, number in enumerate(numbers)]
    base_s = max(shared[0], 0.0)
    return replace(
        costs,
        decode_step_s=base_s,
        decode_curve=Curve(tuple(map(float, numbers)), tuple(each - base_s for each in shared)),
        tokens_a_step=tokens_a_step,
    )
