"""Refuses requests at once that cannot meet their limits.

The predicted time to the first token is that of the prompts that go before it in the order of workers
(`workers.backlog`), in this router's queue and at the workers, and its own, by measured costs. All go before
one that would make another late, which was let in before. Where no decode worker has room under the limits,
it waits for as many slots to be released as there are requests before it, at the rate at which they were
released lately, with a margin, since they are released in bursts. Combined workers that leave their prompts
to others are not counted on for those of the queue: they compute what their streams allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from baton.base.prefill_defaults import MARGIN
from services.router.placement.forecast import TTFT_SAFETY, prompt_at, sequences_within, step_s
from services.router.request.slo import Slo
from services.router.workers.backlog import Prompt, Queued
from services.router.workers.worker import Worker

# What a client is asked to wait at most before it tries again.
_LONGEST_RETRY_S = 60.0
# Slots are released at random: the wait for n of them is taken to be this many of its standard deviations
# longer than on average. A request that is let in and is late after all is refused when it is too late to
# help its client, and one that is refused though it could have been in time costs little: others take the
# slots.
_DEVIATIONS = 6.0


@dataclass(frozen=True, slots=True)
class Demand:
    """A request's demand on workers: `tokens` to prefill, `context` while it decodes on average, `output`
    tokens as far as is known, its limits. `late`: the kind of error if its first token would come too
    late."""

    tokens: int
    context: int
    output: int
    slo: Slo
    late: ErrorKind = ErrorKind.RATE_LIMITED


def predicted_ttft_s(
    demand: Demand,
    left_s: float | None,
    prefills: dict[Worker, int],
    decodes: Sequence[Worker],
    queued: Queued,
) -> float:
    """Seconds to the first token of a request, which is due in `left_s`. `prefills`: the workers that may
    compute its prompt, and what each has cached of it; not empty. `queued`: what waits in the queue."""
    computing = sum(not (worker.exchanges and worker in decodes) for worker in prefills)
    sharing = computing or len(prefills)  # where each computes its own, all do
    parts = [one._replace(seconds=MARGIN * one.seconds / sharing) for one in queued.prompts]

    def soonest(beside: Sequence[Prompt]) -> float:
        return min(
            prompt_at(worker, demand.tokens, cached, left_s, beside).first_token_s
            for worker, cached in prefills.items()
        )

    own = soonest(())
    beside_queued = soonest(parts) if parts else own
    rooms = sum(sequences_within(worker, demand.slo.tpot_s, demand.context) for worker in decodes)
    waits, lacking = 0.0, queued.requests + 1 - rooms
    if lacking > 0 and not any(worker.used_slots for worker in decodes):
        waits = math.inf  # an empty worker has no room under the limit
    elif lacking > 0:
        waits = (lacking + _DEVIATIONS * math.sqrt(lacking)) / sum(
            _released_per_second(worker, demand) for worker in decodes
        )
    return max(waits + own, MARGIN * queued.prefill_s / sharing + beside_queued)


def _released_per_second(worker: Worker, demand: Demand) -> float:
    """The rate at which a decode worker's slots are released: as lately, and while none was, as if its
    sequences took as long as this one will; infinite where that is not known."""
    if worker.turnover.per_second or not worker.used_slots:
        return worker.turnover.per_second
    lasts_s = demand.output * step_s(worker, 0)
    return worker.used_slots / lasts_s if lasts_s else math.inf


def check_in_time(
    demand: Demand,
    left_s: float | None,
    prefills: dict[Worker, int],
    decodes: Sequence[Worker],
    queued: Queued,
) -> None:
    """Raises BatonError where the request cannot meet its limits: RATE_LIMITED, or `demand.late`.

    `left_s`: of its time to the first token; None: unlimited. The rest as for `predicted_ttft_s`.
    """
    if not prefills or not decodes:
        return  # the queue waits for workers
    if left_s is not None:
        predicted = predicted_ttft_s(demand, left_s, prefills, decodes, queued)
        if math.isinf(predicted):
            raise too_late("no decode worker can meet the time per output token", _LONGEST_RETRY_S)
        if predicted > TTFT_SAFETY * left_s:
            why = f"time to first token would be {predicted * 1e3:.0f} ms"
            raise too_late(why, predicted - left_s, demand.late)
    elif not any(sequences_within(worker, demand.slo.tpot_s, demand.context) for worker in decodes):
        raise too_late("no decode worker can meet the time per output token", 1.0)


def too_late(why: str, retry_after_s: float, kind: ErrorKind = ErrorKind.RATE_LIMITED) -> BatonError:
    """The refusal of a request that would miss its limits."""
    wait_s = min(max(retry_after_s, 0.1), _LONGEST_RETRY_S)
    return BatonError(kind, f"refused early: {why}", retry_after_s=wait_s)
