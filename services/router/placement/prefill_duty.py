"""Combined workers that exchange sequences divide the work: half of them are on prefill duty.

Otherwise they would all be alike, each decoding as much as the others between its own prompts, and
what each request gains by another arrangement is too little for them to get there. Workers on duty are
chosen by name, not by load, so that all routers choose the same ones and the choice is stable.

A worker on duty computes prompts that others decode. It decodes some of the sequences that it has prefilled
itself, with time to spare: while prompts leave it enough, it would meet the limits of all that it decodes
though it computed all prompts, and the sequence runs clearly faster there or would miss its limit elsewhere.
For prompts wait for steps of few sequences as well as of many. And it decodes while no other has a slot.

Where workers of role prefill are there, or a single combined one, none is on duty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.router.placement.forecast import miss_risk, step_s
from services.router.workers.recent_work import RECENT_S
from services.router.workers.worker import Worker

# The most of a worker's time that all prompts may take for one on duty to decode too: a step takes two and a
# half times as long as alone then.
MOST_SHARE = 0.6
# A sequence runs clearly faster where a step takes less than this part of what it takes elsewhere. Less would
# have workers on duty decode whenever load grows, since their prompts come before the sequences' steps.
_FASTER = 0.8


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Workers that may decode a request, the best first; `kept`: why those on duty are among them."""

    workers: list[Worker]
    kept: dict[Worker, str] = field(default_factory=dict)


def on_duty(workers: Iterable[Worker]) -> frozenset[Worker]:
    """Those of the workers of a pool that are on prefill duty."""
    alive = [worker for worker in workers if worker.alive]
    if any(worker.prefills_for_others and not worker.decodes for worker in alive):
        return frozenset()
    exchanging = sorted((worker for worker in alive if worker.exchanges), key=lambda worker: worker.name)
    return frozenset(exchanging[: len(exchanging) // 2])


def prompt_share(workers: Iterable[Worker], duty: frozenset[Worker]) -> float:
    """The share of the time of a worker on duty that all prompts of late would take. Those of other routers
    and of sibling processes are taken to be as many as their slots."""
    shares = used = claimed = 0.0
    for worker in workers:
        shares += worker.prefill_share.after()
        used += worker.used_slots
        claimed += worker.claimed_slots
    return shares * max(1.0, used / max(1.0, claimed)) / max(1, len(duty))


def may_decode(workers: Sequence[Worker]) -> list[Worker]:
    """The workers that may decode a new request, whatever their load."""
    duty = on_duty(workers)
    resting = duty if prompt_share(workers, duty) > MOST_SHARE else frozenset()
    return [worker for worker in workers if worker.decodes and worker not in resting]


def choose_decode(
    ordered: Sequence[Worker], has_room: Callable[[Worker], bool], tpot_s: float | None, context: int
) -> DecodeChoice:
    """`ordered`: all workers that the request may use, in the order of decode without duties. `tpot_s`: its
    limit of the time per output token, `context`: the tokens that it has on average."""
    duty = on_duty(ordered)
    if not duty:
        return DecodeChoice(list(ordered))
    others = [worker for worker in ordered if worker not in duty]
    share = prompt_share(ordered, duty)
    if share > MOST_SHARE and any(worker.decodes and worker.has_free_slot for worker in others):
        return DecodeChoice(others)
    other = next(filter(has_room, others), None)
    kept: dict[Worker, str] = {}
    for worker in filter(has_room, duty):
        why = _why_kept(worker, other, share, tpot_s, context)
        if why:
            kept[worker] = why
    return DecodeChoice([*(worker for worker in ordered if worker in kept), *others], kept)


def _why_kept(worker: Worker, other: Worker | None, share: float, tpot_s: float | None, context: int) -> str:
    """Why a worker on duty decodes the request rather than `other`; empty where it does not."""
    more_s = max(0.0, share - worker.prefill_share.after()) * RECENT_S
    if miss_risk(worker, tpot_s, context, more_s).misses:
        return ""
    if other is None:
        return "no room elsewhere"
    here_s, there_s = step_s(worker, 1, context, more_s), step_s(other, 1, context)
    misses = miss_risk(other, tpot_s, context).misses
    if not misses and here_s >= _FASTER * there_s:
        return ""
    return (
        f"a step takes {here_s * 1e3:.1f} ms, elsewhere {there_s * 1e3:.1f} and {misses} more limits missed"
    )
