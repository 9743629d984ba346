"""Orders the workers that are considered for one request.

A decode worker by the limits that would be missed there, then by the delay of all requests together, in
seconds: of the prompt, where the way that delays least is taken; of the request's own tokens; and of the
sequences that run there, whose steps become longer. So a conversation stays where its KV is cached, unless
that worker runs enough sequences more than another one that computing its tokens again costs less. Where step
costs are not known, by what the cache saves, then by free slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from services.router.placement.forecast import (
    PromptAt,
    decode_misses,
    knows_sequences,
    prefill_delay_s,
    prefill_misses,
    sequence_delay_s,
    step_s,
)
from services.router.request.slo import Due
from services.router.workers.worker import Worker


class PrefillOrder(NamedTuple):
    """Sort key of a prefill worker: whether it is a suspect, limits that would be missed, the delay of all
    requests in seconds, load, then distance."""

    suspect: bool
    misses: int
    delay_s: float
    load: int
    far: bool


class DecodeOrder(NamedTuple):
    """Sort key of a decode worker: whether it is a suspect, limits that would be missed, the delay of all
    requests in seconds, then what a combined worker's cache saves beyond its queue, free slots (both
    negative), promised tokens, and cached tokens (negative): blocks that a worker has are not sent."""

    suspect: bool
    misses: int
    delay_s: float
    saves: int
    free: int
    reserved: int
    hits: int


@dataclass(frozen=True)
class WorkerOrder:
    """The sort keys of workers for one request; smaller ones are better. Delays are rounded to ms.

    `hits`: tokens of the prompt that each worker has cached. `prompt`: the prompt there. `due`: when the
    first token is due. `behind`: how many requests wait for prefill workers behind it. `tpot_s`: its limit of
    the time per output token. `context`, `output`: its tokens on average while it is decoded, and those of
    its output. `computes_itself`: whether a decode worker would compute the prompt in any case.
    `suspects`: workers with which an attempt of it failed; they come last.
    """

    hits: Mapping[Worker, int]
    prompt: Callable[[Worker], PromptAt]
    due: Due | None
    behind: int
    tpot_s: float | None
    context: int
    output: int
    computes_itself: Callable[[Worker], bool]
    suspects: Collection[Worker] = ()

    def prefill(self, decode: Worker, prefill: Worker) -> PrefillOrder:
        """Sort key of a prefill worker, for a sequence that `decode` decodes."""
        prompt = self.prompt(prefill)
        misses = prefill_misses(prefill, prompt, None if self.due is None else self.due.left_s)
        delay_s = round(self._prompt_delay_s(decode, prefill), 3)
        load = prefill.prefill_queue_tokens - self.hits[prefill]
        suspect = prefill in self.suspects
        return PrefillOrder(suspect, misses, delay_s, load, prefill.group != decode.group)

    def decode(self, worker: Worker) -> DecodeOrder:
        """Sort key of a decode worker."""
        if not worker.decodes:
            return DecodeOrder(False, 0, 0.0, 0, 0, 0, 0)
        hits, free = self.hits[worker], worker.free_slots
        before_s, after_s = step_s(worker, 0), step_s(worker, 1, self.context)
        delay_s = round(sequence_delay_s(worker, self.tpot_s, self.output, before_s, after_s), 3)
        if not knows_sequences(worker, self.context):  # it gets work, but no more than others
            delay_s = 0.0 if worker.used_slots <= self._least_used else math.inf
        elif self._some_prefill_themselves:
            delay_s = round(delay_s + self._least_prompt_delay_s(worker), 3)
        if self.computes_itself(worker):
            after_s = step_s(worker, 1, self.context, self.prompt(worker).own_s)
        misses = decode_misses(worker, self.tpot_s, before_s, after_s)
        saves = max(0, hits - worker.prefill_queue_tokens) if worker.prefills_itself else 0
        suspect = worker in self.suspects
        return DecodeOrder(suspect, misses, delay_s, -saves, -free, worker.reserved_tokens, -hits)

    def reason(self, decode: Worker, prefill: Worker, able: Iterable[Worker]) -> str:
        """Says why `prefill` computes a prompt for a worker that may do so itself; empty where there is no
        choice among those that are `able` to."""
        if not decode.exchanges:
            return ""
        own = prefill is decode
        others = [worker for worker in able if (worker is decode) is not own]
        if not others:
            return ""
        chosen = self.prefill(decode, prefill)
        other = min(self.prefill(decode, one) for one in others)
        return (
            f"{'own' if own else 'other'} prefill: {chosen.misses} limits missed, all delayed by "
            f"{chosen.delay_s * 1e3:.0f} ms; {'other' if own else 'own'}: {other.misses}, "
            f"{other.delay_s * 1e3:.0f} ms"
        )

    def _prompt_delay_s(self, decode: Worker, prefill: Worker) -> float:
        behind = self.behind if decode.exchanges else 0
        return prefill_delay_s(prefill, self.prompt(prefill), prefill is not decode, behind, self.due)

    def _least_prompt_delay_s(self, decode: Worker) -> float:
        """Delay of the prompt by the way that delays least; the same for all decode workers that compute no
        prompts."""
        delays = [self._prompt_delay_s(decode, decode)] if decode.prefills_itself else []
        if not self.computes_itself(decode):
            delays += [delay_s for delay_s, other in self._least_of_others if other is not decode][:1]
        return min(delays, default=0.0)

    @cached_property
    def _least_used(self) -> float:
        """Slots of the decode worker that uses fewest of those whose step costs are known."""
        known = (one for one in self.hits if one.decodes and knows_sequences(one, self.context))
        return min((worker.used_slots for worker in known), default=math.inf)

    @cached_property
    def _some_prefill_themselves(self) -> bool:
        return any(worker.prefills_itself for worker in self.hits)

    @cached_property
    def _least_of_others(self) -> list[tuple[float, Worker]]:
        """The two ways over a prefill worker that delay least, which are enough to leave one out."""
        able = [worker for worker in self.hits if worker.prefills_for_others and worker.accepts_work]
        behind = self.behind
        delays = [(prefill_delay_s(one, self.prompt(one), True, behind, self.due), one) for one in able]
        return sorted(delays, key=lambda each: each[0])[:2]
