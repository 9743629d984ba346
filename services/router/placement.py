"""Which pair serves a request: the emptiest decode worker and, for it, the idlest prefill worker.

Decode credits gate prefill: a request is placed only where a slot is free and where the prefill
worker will come to it soon, so that no slot waits long for its first token.

Of decode workers that are equally empty, the one that has most of the prompt: what it holds is not sent.
Idlest counts what is cached: a worker's cost is the tokens queued there before the prompt, less those of the
prompt that it has. So the longest prefix wins, unless its owner's queue is longer by more than that saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.router.directory import Directory
    from services.router.worker import Worker

    Cached = Callable[[Worker], int]


def nothing_cached(worker: Worker) -> int:
    """Of a prompt, at any worker."""
    return 0


class PrefillClaim:
    """A prefill worker's share in our own counters, for a prompt that nothing follows. Every method
    may be called again without effect."""

    def __init__(self, prefill: Worker, tokens: int) -> None:
        self.prefill = prefill
        self._tokens = tokens
        prefill.queued_tokens += tokens

    def prefill_ended(self) -> None:
        """Prefill has computed these tokens, or never will."""
        tokens, self._tokens = self._tokens, 0
        self.prefill.queued_tokens -= tokens
        if tokens:
            self.prefill.changed()

    def release(self) -> None:
        """Nothing is claimed any more."""
        self.prefill_ended()


class Claim(PrefillClaim):
    """A pair's promise in our own counters; whoever holds it calls `release` when the worker's
    promise has ended too."""

    def __init__(self, prefill: Worker, decode: Worker, tokens: int, promised: int) -> None:
        super().__init__(prefill, tokens)
        self.decode = decode
        self._promised = promised
        self._released = False
        decode.claimed_slots += 1
        decode.promised_tokens += promised

    @property
    def sure_of_room(self) -> bool:
        """Whether the prompt may be run before decode has promised its slot."""
        return self.prefill is not self.decode and self.decode.sure_of_room

    def release(self) -> None:
        """The slot is free again."""
        super().release()
        if not self._released:
            self._released = True
            self.decode.claimed_slots -= 1
            self.decode.promised_tokens -= self._promised
            self.decode.changed()


class Placement:
    """Chooses by our own live counters, corrected by heartbeats."""

    def __init__(self, directory: Directory, prefill_ahead_tokens: int) -> None:
        self._directory = directory
        self._ahead = prefill_ahead_tokens

    def usable(self) -> bool:
        """Whether some pair would serve a request, now or when it has room."""
        return any(
            worker.alive and worker.decodes and self._prefills(worker) for worker in self._directory.workers
        )

    def pick(self, tokens: int, max_tokens: int, cached: Cached = nothing_cached) -> Claim | None:
        """Claims the best pair with room for `tokens` to prefill, or None where there is none. `cached`: how
        many of them a worker has; each is asked about once."""
        has = {worker: cached(worker) for worker in self._directory.workers}
        for decode in sorted(has, key=lambda worker: _emptiest_first(worker, has[worker])):
            if not (decode.decodes and decode.asks_for_work and decode.free_slots > 0):
                continue
            idle = [worker for worker in self._prefills(decode) if self._starts_soon(worker)]
            if idle:
                prefill = min(idle, key=lambda worker: worker.queued_tokens - has[worker])
                return Claim(prefill, decode, tokens - has[prefill], tokens + max_tokens)
        return None

    def pick_prefill(self, tokens: int) -> PrefillClaim | None:
        """Claims the idlest worker that computes prompts, for a prompt of `tokens` alone."""
        idle = [worker for worker in self._directory.workers if worker.alive and self._starts_soon(worker)]
        able = [worker for worker in idle if worker.prefills_for_others or worker.prefills_itself]
        return PrefillClaim(min(able, key=lambda worker: worker.queued_tokens), tokens) if able else None

    def _prefills(self, decode: Worker) -> list[Worker]:
        if decode.prefills_itself:
            return [decode]
        fingerprint = decode.described.fingerprint
        return [
            worker
            for worker in self._directory.workers
            if worker.prefills_for_others and worker.alive and worker.described.fingerprint == fingerprint
        ]

    def _starts_soon(self, worker: Worker) -> bool:
        return worker.asks_for_work and worker.queued_tokens < self._ahead


def _emptiest_first(worker: Worker, has: int) -> tuple[int, int, int, int]:
    """A worker that prefills for itself comes first by what its cache saves beyond its queue."""
    saves = max(0, has - worker.queued_tokens) if worker.prefills_itself else 0
    return (-saves, -worker.free_slots, worker.promised_tokens, -has)
