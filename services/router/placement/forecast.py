"""Predicts latencies at a worker from its measured step costs and this router's own counts.

Step costs come with heartbeats and change slowly. What a router has sent since then it knows from
its own claims, so a prediction is never older than they are, except for the work of other routers. Everything
that is not known yet counts as 0: a worker that was never measured gets work, and is measured. Times per
output token are corrected by what recent requests had at the worker (`tpot_ratio`).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from baton.base.prefill_defaults import MOST_PREFILL_SHARE
from baton.perf_model.step_costs import HANDOFF_S, StepCosts
from services.router.request.slo import Due
from services.router.workers.backlog import Prompt, PromptWait
from services.router.workers.decode_load import DecodeLoad
from services.router.workers.worker import Worker

# The share of a limit up to which it counts as met, since predictions have errors: of the time to the first
# token, and of the time per output token, whose errors on average `tpot_ratio` corrects.
TTFT_SAFETY, TPOT_SAFETY = 0.95, 0.98
# Sequences whose steps are predicted to take longer than this many times their limit are treated as already
# missed: the limit is of their mean, and predictions vary.
_LOST = 1.1
# Largest weight of a second of delay to a sequence that has a limit, relative to one to a request without.
_MOST_URGENT = 10.0
# The share of its limit from which on a prompt's delay counts more than that of a request without.
_URGENT_FROM = 0.5
# Share of a step that a sequence adds up to which its cost counts as unknown: that much is the noise
# of a fit through steps of nearly one load. To a step of an 8B model on one GPU a sequence adds a hundredth.
_SEQUENCE_NOISE = 0.001
# A token of output, in prompt tokens, where step costs are not known.
USUAL_OUTPUT_TOKEN_COST = 4.0
# Output tokens above which a request's `max_tokens` is no prediction of its length.
_USUAL_OUTPUT = 512


def mean_context(tokens: int, max_tokens: int) -> int:
    """Tokens that a request has on average while it decodes; few outputs are as long as they may be."""
    return tokens + usual_output(max_tokens) // 2


def usual_output(max_tokens: int) -> int:
    """Tokens of a request's output, as far as its `max_tokens` bounds them."""
    return min(max_tokens, _USUAL_OUTPUT)


class PromptAt(NamedTuple):
    """A prompt at a prefill worker: the seconds that it takes there, and its wait behind the others."""

    own_s: float
    wait: PromptWait

    @property
    def first_token_s(self) -> float:
        """Seconds until its first token."""
        return self.wait.wait_s + self.own_s


def prompt_at(
    worker: Worker,
    tokens: int,
    cached: int = 0,
    left_s: float | None = None,
    queued: Sequence[Prompt] = (),
) -> PromptAt:
    """Predicts a prompt that is sent to a worker now, and is due in `left_s`, of which `TTFT_SAFETY` counts;
    beside `queued`, which will be sent there too. Takes time in proportion to the prompts that are there."""
    own_s = worker.costs.prompt_s(tokens, cached)
    due_s = None if left_s is None else TTFT_SAFETY * left_s
    return PromptAt(own_s, worker.backlog.wait_of(own_s, due_s, queued))


def step_s(worker: Worker, sequences: int = 1, context_tokens: int = 0, more_prefill_s: float = 0.0) -> float:
    """Seconds from one token to the next of all sequences that the worker runs or has reserved slots for, and
    of `sequences` more with `context_tokens` together; while it computes prompts as much as lately, and one
    more that takes `more_prefill_s`; 0 where step costs are not known."""
    load = DecodeLoad(
        worker.used_slots + sequences,
        worker.context_tokens + context_tokens,
        worker.prefill_share.after(more_prefill_s),
    )
    return worker.tpot_ratio.value * loaded_step_s(worker.costs, load)


def loaded_step_s(costs: StepCosts, load: DecodeLoad) -> float:
    """Seconds from one token to the next in that load, by a worker's own costs; 0 where they are not
    known."""
    alone_s = costs.token_s(load.sequences, load.context_tokens)
    return alone_s / (1 - min(MOST_PREFILL_SHARE, load.prefill_share))


def output_token_cost(prefill: Worker, decode: Worker, context_tokens: int) -> float:
    """Number of prompt tokens that take as long to compute as one token of output: its part of a step of all
    slots. `context_tokens`: of its sequence, on average."""
    prompt_token_s, costs = prefill.costs.prefill_token_s, decode.costs
    shared_s = costs.shared_s / max(1, decode.described.load.slots)
    token_s = shared_s + costs.each_s(context_tokens)
    return token_s / prompt_token_s if token_s and prompt_token_s else USUAL_OUTPUT_TOKEN_COST


def decode_misses(worker: Worker, tpot_s: float | None, before_s: float, after_s: float) -> int:
    """Number of requests that miss their TPOT limits if one more sequence makes steps of `before_s` last
    `after_s`, itself included. Those whose limits are missed there already count no more, so that those with
    loose limits gather with them, and tight limits are met elsewhere."""
    own = tpot_s is not None and tpot_s < after_s / TPOT_SAFETY
    return own + _newly_missed(worker, before_s / TPOT_SAFETY, after_s)


def keeps_others_in_time(worker: Worker, context_tokens: int, sequences: int = 1) -> bool:
    """True if the sequences that a worker decodes meet their limits beside `sequences` more of
    `context_tokens` each, as far as they may still meet them."""
    after_s = step_s(worker, sequences, sequences * context_tokens)
    return not _newly_missed(worker, step_s(worker, 0) / _LOST, after_s)


def _newly_missed(worker: Worker, lost_s: float, after_s: float) -> int:
    """Number of sequences there that miss their limits where steps last `after_s`, of those whose limits are
    at least `lost_s`."""
    limits = worker.tpot_limits
    return bisect.bisect_left(limits, after_s / TPOT_SAFETY) - bisect.bisect_left(limits, lost_s)


def prefill_delay_s(
    prefill: Worker, prompt: PromptAt, handed_over: bool, behind: int, due: Due | None = None
) -> float:
    """Seconds by which a prompt computed at `prefill` delays requests, all together, each by its urgency: its
    own until its first token, with the handoff where there is one; those that `prefill` decodes, whose steps
    do not run meanwhile; and `behind` others that wait for prefill workers, taken to be as urgent as
    itself."""
    own_s, delay_s = prompt.own_s, prompt.first_token_s
    if handed_over:
        delay_s += HANDOFF_S + behind * own_s
    delay_s *= prompt_urgency(prompt.first_token_s, due)
    if prefill.decodes:
        delay_s += _delayed(prefill, step_s(prefill, 0, 0, own_s)) * own_s
    return delay_s


def sequence_delay_s(
    worker: Worker, tpot_s: float | None, output_tokens: int, before_s: float, after_s: float
) -> float:
    """Seconds by which one more sequence, that makes steps of `before_s` last `after_s`, delays requests at a
    decode worker, all together, each by its urgency: its own tokens, and those that the others generate
    meanwhile."""
    own_s = after_s * (1.0 if tpot_s is None else stream_urgency(after_s / tpot_s))
    return output_tokens * (own_s + _delayed(worker, before_s) * (after_s - before_s))


def _delayed(worker: Worker, token_s: float) -> float:
    """Number of sequences that are delayed where they are decoded, those with limits weighted by their
    urgency while each token takes `token_s`. Those of other routers are taken to be like this router's; where
    it has none there, to be without limits."""
    limits = worker.tpot_limits
    claimed = max(worker.claimed_slots, len(limits))
    if not claimed:
        return worker.used_slots
    urgency, at = float(claimed - len(limits)), 0
    while at < len(limits):  # many sequences have the same limit
        end = bisect.bisect_right(limits, limits[at], at)
        urgency += (end - at) * stream_urgency(token_s / limits[at])
        at = end
    return worker.used_slots * urgency / claimed


def stream_urgency(used: float) -> float:
    """Weight of a second of delay to a sequence whose steps take the share `used` of its limit: little while
    it has time to spare, 1 at 0.86 of it, and growing towards the limit.

    Chosen in virtual time with the one of prompts (docs/scheduling.md): where it is more, requests wait for a
    busy prefill worker until their first token is late, though decode has time to spare; where it is less,
    prompts take time of decode that its streams need.
    """
    return _MOST_URGENT if used >= 1 else min(_MOST_URGENT, used**4 / (4 * (1 - used)))


def prompt_urgency(first_token_s: float, due: Due | None) -> float:
    """Weight of a second of delay to a request whose first token comes in `first_token_s`: 1 up to half of
    its limit, and 16 at the limit."""
    if due is None or not due.limit_s:
        return 1.0
    used = (due.limit_s - due.left_s + first_token_s) / due.limit_s
    return max(1.0, min(1.0, used) / _URGENT_FROM) ** 4


def prefill_misses(prefill: Worker, prompt: PromptAt, left_s: float | None) -> int:
    """Number of requests that miss their limits because of a prompt computed there: itself, whose first token
    is due in `left_s`, and those that the worker decodes, as far as they may still meet them."""
    late = left_s is not None and prompt.first_token_s > TTFT_SAFETY * left_s
    if not prefill.tpot_limits:
        return int(late)
    return late + _newly_missed(prefill, step_s(prefill, 0) / _LOST, step_s(prefill, 0, 0, prompt.own_s))


def meets_alone(worker: Worker, tpot_s: float, context_tokens: int) -> bool:
    """True if a decode worker that ran nothing else would meet the limit of a sequence of
    `context_tokens`."""
    alone_s = worker.costs.shared_s + worker.costs.each_s(context_tokens)
    return worker.tpot_ratio.value * alone_s <= TPOT_SAFETY * tpot_s


def knows_sequences(worker: Worker, context_tokens: int) -> bool:
    """True if a decode worker's costs say what one more sequence of `context_tokens` costs. After steps of
    few different loads they hardly do, and by them a worker that seems a little faster than another one takes
    all sequences."""
    return worker.costs.each_s(context_tokens) > _SEQUENCE_NOISE * worker.costs.shared_s


def sequences_within(worker: Worker, tpot_s: float | None, context_tokens: int) -> int:
    """Number of further sequences of `context_tokens` that a decode worker has slots for, and can run within
    a limit beside those that will still run when their prompts are computed (`staying`)."""
    free = max(0, worker.free_slots)
    if tpot_s is None:
        return free
    costs, staying = worker.costs, worker.staying
    slots, tokens = staying * worker.used_slots, staying * worker.context_tokens
    share = 1 - min(MOST_PREFILL_SHARE, worker.prefill_share.after(0.0))
    left_s = share * TPOT_SAFETY * tpot_s / worker.tpot_ratio.value

    def takes_s(more: int) -> float:
        return costs.token_s(slots + more, tokens + more * context_tokens)

    return max(0, bisect.bisect_right(range(free + 1), left_s, key=takes_s) - 1)
