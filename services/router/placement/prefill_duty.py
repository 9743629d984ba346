"""Combined workers that exchange sequences divide the work, or each compute their own prompts.

Where prompts take more of their time than sequences do, half of them are on prefill duty: they compute
prompts, and decode only while no other has a free slot. Otherwise they would all be alike, each decoding as
much as the others between its own prompts, and what each request gains by another arrangement is too little
for them to get there. Workers on duty are chosen by name, not by load, so that all routers choose the same
ones and the choice is stable.

Where sequences take more time, none is on duty, and each computes the prompts of what it decodes. Let `a` be
the time of a step without sequences, `e` what each adds, `p` the time of a prompt and `o` its output tokens.
Under a limit `L` of the time per output token two workers then run 2 (L - a) / (e + p / o) sequences, and
(L - a) / e where one of them decodes: fewer, if e > p / o. Over all sequences that compares what they add to
each step with the prompts that come meanwhile.

Where workers of role prefill are there, or a single combined one, none is on duty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.router.placement.forecast import sequences_share
from services.router.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Workers that may decode a request, the best first. `own`: those of them that would compute its prompt,
    too, and why; `spare`: they are on prefill duty."""

    workers: list[Worker]
    own: dict[Worker, str] = field(default_factory=dict)
    spare: bool = False


@dataclass(frozen=True, slots=True)
class _Shares:
    """What prompts and sequences take of the time of all workers, as shares of one worker's."""

    prompts: float
    sequences: float

    @property
    def own_prompts(self) -> bool:
        """Whether each worker computes its own prompts."""
        return self.sequences > self.prompts


def on_duty(workers: Iterable[Worker]) -> frozenset[Worker]:
    """Those of the workers of a pool that are on prefill duty where prompts take more time than sequences."""
    alive = [worker for worker in workers if worker.alive]
    if any(worker.prefills_for_others and not worker.decodes for worker in alive):
        return frozenset()
    exchanging = sorted((worker for worker in alive if worker.exchanges), key=lambda worker: worker.name)
    return frozenset(exchanging[: len(exchanging) // 2])


def _shares(workers: Sequence[Worker]) -> _Shares:
    """Of late. Prompts of other routers and of sibling processes are taken to be as many as their slots."""
    prompts = sum(worker.prefill_share.after() for worker in workers)
    used = sum(worker.used_slots for worker in workers)
    claimed = max(1, sum(worker.claimed_slots for worker in workers))
    sequences = sum(sequences_share(worker) for worker in workers if worker.decodes)
    return _Shares(prompts * max(1.0, used / claimed), sequences)


def may_decode(workers: Sequence[Worker]) -> list[Worker]:
    """The workers that decode a new request where all of them have a free slot."""
    duty = on_duty(workers)
    if duty and _shares(workers).own_prompts:
        duty = frozenset()
    return [worker for worker in workers if worker.decodes and worker not in duty]


def choose_decode(ordered: Sequence[Worker]) -> DecodeChoice:
    """`ordered`: all workers that a request may use, in the order of decode without duties."""
    duty = on_duty(ordered)
    if not duty:
        return DecodeChoice(list(ordered))
    shares = _shares(ordered)
    if shares.own_prompts:
        why = (
            f"own prefill: of a worker's time, prompts take {shares.prompts:.0%}, sequences "
            f"{shares.sequences:.0%}"
        )
        return DecodeChoice(list(ordered), {worker: why for worker in ordered if worker.prefills_itself})
    others = [worker for worker in ordered if worker not in duty]
    if any(worker.decodes and worker.has_free_slot for worker in others):
        return DecodeChoice(others)
    why = "kept on prefill duty: no other worker has a free slot"
    return DecodeChoice([*others, *duty], dict.fromkeys(duty, why), spare=True)
