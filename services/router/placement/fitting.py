"""Finds the workers that may serve one request: by the limits that they describe, and by where its attempts
failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.router.request.limits import Needs
from services.router.workers.worker import Worker


class FailedPair(NamedTuple):
    """The workers of a failed attempt; `decode`: None for a prompt without output."""

    prefill: Worker
    decode: Worker | None


class Fitting(NamedTuple):
    """The live workers that a request fits, by what they would do."""

    prefills: frozenset[Worker]
    decodes: frozenset[Worker]


@dataclass(frozen=True, slots=True)
class Fit:
    """Constraints of one attempt's placement. `avoided`: pairs that it is not placed on. `suspects`: workers
    that are considered after all others."""

    needs: Needs
    avoided: Sequence[FailedPair] = ()
    suspects: frozenset[Worker] = frozenset()

    def prefills(self, worker: Worker) -> bool:
        """True if the attempt is within the limits of a worker that would compute its prompt."""
        return worker.limits.prefills(self.needs)

    def decodes(self, worker: Worker) -> bool:
        """True if the attempt is within the limits of a worker that would decode it."""
        return worker.limits.decodes(self.needs)

    def pair(self, prefill: Worker, decode: Worker) -> bool:
        """True if a prefill worker may compute the prompt for a decode worker that the attempt fits."""
        if not (prefill.can_prefill_for(decode) and self.prefills(prefill)):
            return False
        if prefill is not decode and not prefill.links.usable(decode):
            return False
        return not self.avoided or (prefill, decode) not in self.avoided

    def some_pair(self, workers: Sequence[Worker]) -> bool:
        """True if some pair may serve the attempt, now or once it has room. A link over which one request is
        sent to try it again counts."""
        return any(
            self.prefills(prefill)
            and prefill.can_prefill_for(decode)
            and not (self.avoided and (prefill, decode) in self.avoided)
            for decode in workers
            if decode.decodes and self.decodes(decode) and decode.alive
            for prefill in workers
        )

    def among(self, workers: Iterable[Worker]) -> Fitting:
        """Returns the live workers among `workers` that the attempt fits."""
        alive = [worker for worker in workers if worker.alive]
        return Fitting(
            frozenset(one for one in alive if one.prefills and self.prefills(one)),
            frozenset(one for one in alive if one.decodes and self.decodes(one)),
        )


def fit_of(needs: Needs, failed: Sequence[FailedPair], workers: Sequence[Worker]) -> Fit:
    """Returns the fit of an attempt whose earlier ones failed on these pairs: they are avoided while another
    pair can serve it, busy or not. Pairs without any of their workers are preferred. What failed with a
    worker that is lost says nothing of the other one."""
    failed = [pair for pair in failed if not (pair.prefill.lost or (pair.decode and pair.decode.lost))]
    if not failed:
        return Fit(needs)
    suspects = frozenset(worker for pair in failed for worker in pair if worker is not None)
    avoiding = Fit(needs, failed, suspects)
    return avoiding if avoiding.some_pair(workers) else Fit(needs, suspects=suspects)
