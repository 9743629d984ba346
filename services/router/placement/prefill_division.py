"""Decides whether combined workers that exchange sequences divide the work, or each compute their own
prompts.

Where prompts take more time than sequences, half of the workers are designated for prefill: they compute
prompts, and decode only while no other has a free slot. Otherwise they would all be alike, each decoding as
much as the others between its own prompts, and what each request gains by another arrangement is too little
for them to get there. Designated workers are chosen by name, not by load, so that all routers choose the same
ones and the choice is stable.

Where sequences take more time, none is designated, and each computes the prompts of what it decodes. Let `a`
be the time of a step without sequences, `e` what each adds, `p` the time of a prompt and `o` its output
tokens. Under a TPOT limit `L`, `n` workers then run n (L - a) / (e + p / o) sequences, and (n - d) (L - a) /
e where `d` of them are designated for prefill: fewer, if d e o > (n - d) p. Moving averages over recent
requests decide which holds, not the workers' current utilisation: that depends on the arrangement itself, and
lags behind the load.

Where workers of role prefill are there, or a single combined one, none is designated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.perf_model.step_costs import StepCosts
from services.router.workers.recent_mean import RecentMean
from services.router.workers.worker import Worker

# The ratio d e o / ((n - d) p) from which on workers compute their own prompts, and below which they cease
# to. Between them both arrangements serve about as much; what runs in one of them is in the way of the other.
_OWN_FROM, _OWN_UNTIL = 1.25, 0.8
# Number of requests over which workers' decode costs are averaged, from an initial value of 0.
_COST_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Workers that may decode a request, the best first. `own`: those of them that would compute its prompt,
    too, and why; `spare`: they are designated for prefill."""

    workers: list[Worker]
    own: dict[Worker, str] = field(default_factory=dict)
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """The division of prefill and decode among the workers of a pool, as seen by one placement. `designated`:
    workers designated for prefill. `why_own`: the reason why each worker that exchanges sequences computes
    the prompts of the sequences that it decodes; empty where it does not have to."""

    designated: frozenset[Worker] = frozenset()
    why_own: str = ""

    def computes_itself(self, worker: Worker) -> bool:
        """True if a decode worker computes the prompts of what it decodes in any case."""
        return worker.prefills_itself and (bool(self.why_own) or not worker.exchanges)

    def may_decode(self, workers: Iterable[Worker]) -> list[Worker]:
        """The workers that may decode a new request, whatever their room under limits."""
        decodes = [worker for worker in workers if worker.decodes]
        others = [worker for worker in decodes if worker not in self.designated]
        return others if any(worker.has_free_slot for worker in others) else decodes

    def choose_decode(self, ordered: Sequence[Worker], may_use: Callable[[Worker], bool]) -> DecodeChoice:
        """Chooses among the workers that a request may use: `ordered`, in the order of decode without
        designation; `may_use`: whether it may use one with a free slot."""
        if self.why_own:
            own = dict.fromkeys((worker for worker in ordered if worker.prefills_itself), self.why_own)
            return DecodeChoice(list(ordered), own)
        others = [worker for worker in ordered if worker not in self.designated]
        kept = [worker for worker in ordered if worker in self.designated]
        if not kept or any(worker.decodes and worker.has_free_slot and may_use(worker) for worker in others):
            return DecodeChoice(others)
        why = "designated for prefill: no other worker has a free slot"
        return DecodeChoice([*others, *kept], dict.fromkeys(kept, why), spare=True)


def designated_for_prefill(workers: Iterable[Worker]) -> frozenset[Worker]:
    """Returns the workers of a pool that are designated for prefill where prompts take more time than
    sequences."""
    alive = [worker for worker in workers if worker.alive]
    if any(worker.prefills_for_others and not worker.decodes for worker in alive):
        return frozenset()
    exchanging = sorted((worker for worker in alive if worker.exchanges), key=lambda worker: worker.name)
    return frozenset(exchanging[: len(exchanging) // 2])


class PrefillDivision:
    """Chooses the workers that compute prompts and those that decode, by what recent requests took."""

    def __init__(self) -> None:
        # Of requests that were placed: seconds of their prompts where each worker computes its own, their
        # output tokens, and these times the tokens of their context.
        self._prompt_s, self._tokens, self._contexts = RecentMean(), RecentMean(), RecentMean()
        # Seconds by which a sequence, and a token of context, make a step longer, by the costs of the workers
        # that requests were placed on. Of few requests, since until the load has varied for a while workers
        # take what sequences cost for a part of the step itself; not of the first alone, which are rough.
        self._sequence_s, self._context_token_s = (
            RecentMean(0.0, _COST_REQUESTS, _COST_REQUESTS) for _ in range(2)
        )
        # Of requests that have ended: the share of the output tokens that they asked for.
        self._output_share = RecentMean(1.0)
        # Whether each computes its own prompts, as this process and the first one of the router saw it last.
        self.own_prompts = False
        self.first_process: bool | None = None

    @property
    def means(self) -> tuple[RecentMean, ...]:
        """The means that all processes of a router must agree on: one that chooses otherwise than the others
        would place sequences where these leave no room."""
        return (
            self._prompt_s, self._tokens, self._contexts, self._sequence_s, self._context_token_s,
            self._output_share,
        )  # fmt: skip

    def placed(self, prompt_s: float, costs: StepCosts, context: int, max_tokens: int) -> None:
        """Records a request that was placed on a decode worker with these costs: it has at most `max_tokens`
        of output, `context` tokens on average, and its prompt takes `prompt_s` of the combined worker that
        has cached most of it."""
        tokens = max_tokens * self._output_share.value
        self._prompt_s.observe(prompt_s)
        self._tokens.observe(tokens)
        self._contexts.observe(tokens * context)
        each_s = costs.each_s(0)
        if each_s or costs.decode_context_token_s:
            self._sequence_s.observe(each_s)
            self._context_token_s.observe(costs.decode_context_token_s / costs.tokens_a_step)

    def ended(self, tokens: int, max_tokens: int) -> None:
        """Records a request that has ended with `tokens` output tokens."""
        self._output_share.observe(tokens / max_tokens)

    def divide(self, workers: Iterable[Worker]) -> Division:
        """Divides prefill and decode among these workers, of one pool."""
        pool = list(workers)
        designated = designated_for_prefill(pool)
        if not designated or not self._compute_their_own(pool, designated):
            return Division(designated)
        prompt_ms, sequence_ms = 1e3 * self._prompt_s.value, 1e3 * self._sequences_s
        means = f"a request's prompt takes {prompt_ms:.0f} ms on average, its sequence {sequence_ms:.0f}"
        return Division(why_own=f"own prefill: {means}")

    @property
    def _sequences_s(self) -> float:
        """Seconds that a request's sequence adds to the steps of its worker, all together."""
        sequence_s, context_token_s = self._sequence_s.value, self._context_token_s.value
        return self._tokens.value * sequence_s + self._contexts.value * context_token_s

    def _compute_their_own(self, workers: Sequence[Worker], designated: frozenset[Worker]) -> bool:
        """True if each worker computes its own prompts, with hysteresis: between both thresholds as before,
        and as the first process says where there are several."""
        others = sum(worker.alive and worker.exchanges for worker in workers) - len(designated)
        sequences, prompts = len(designated) * self._sequences_s, others * self._prompt_s.value
        before = self.own_prompts if self.first_process is None else self.first_process
        self.own_prompts = sequences > (_OWN_UNTIL if before else _OWN_FROM) * prompts
        return self.own_prompts
