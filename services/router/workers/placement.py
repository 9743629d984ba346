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
    from collections.abc import Callable, Iterable

    from services.router.request.pool import Binding
    from services.router.workers.directory import Directory
    from services.router.workers.pools import Pools
    from services.router.workers.worker import Worker

    Cached = Callable[[Worker], int]
    MayUse = Callable[[Worker], bool]


def nothing_cached(worker: Worker) -> int:
    """Of a prompt, at any worker."""
    return 0


def any_worker(worker: Worker) -> bool:
    """A request may be placed on all of them."""
    return True


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
    """Chooses among the workers of one pool, by this router's own live counters, corrected by heartbeats."""

    def __init__(self, directory: Directory, pools: Pools, prefill_ahead_tokens: int) -> None:
        self._directory = directory
        self._pools = pools
        self._ahead = prefill_ahead_tokens

    @property
    def current_pool(self) -> str | None:
        """The pool that requests are placed in that are not bound to one."""
        return self._pools.current

    @property
    def several_pools(self) -> bool:
        """Whether requests may be bound to different pools."""
        return self._pools.several

    def usable(self, binding: Binding | None = None) -> bool:
        """Whether some pair would serve a new request, or one that is bound, now or when it has room."""
        workers = self._admitted(binding)
        return any(self._prefills(decode, workers) for decode in workers if decode.alive and decode.decodes)

    def unusable_reason(self) -> str:
        """What is missing while `usable` is false."""
        alive = [worker for worker in self._directory.workers if worker.alive]
        if not alive:
            return "no worker is ready"
        members = [worker for worker in alive if worker.serves]
        if not members:
            return "no worker that is ready belongs to the model's pool"
        if not any(worker.decodes for worker in members):
            return "no decode worker is ready"
        if not any(worker.prefills_for_others for worker in members):
            return "no prefill worker is ready"
        return "no prefill worker matches a decode worker"

    def pick(
        self,
        tokens: int,
        max_tokens: int,
        cached: Cached = nothing_cached,
        binding: Binding | None = None,
        may_use: MayUse = any_worker,
    ) -> Claim | None:
        """Claims the best pair with room for `tokens` to prefill, or None where there is none; binds the
        request to its pool.

        `cached`: how many of the tokens a worker has; each is asked about once. `may_use`: whether the
        request may be placed on a decode worker that has a free slot.
        """
        has = {worker: cached(worker) for worker in self._admitted(binding)}
        for decode in sorted(has, key=lambda worker: _emptiest_first(worker, has[worker])):
            if not (decode.decodes and decode.asks_for_work and decode.free_slots > 0 and may_use(decode)):
                continue
            idle = [worker for worker in self._prefills(decode, has) if self._starts_soon(worker)]
            if idle:
                prefill = min(idle, key=lambda worker: worker.queued_tokens - has[worker])
                if binding is not None:
                    binding.bind(prefill, decode)
                return Claim(prefill, decode, tokens - has[prefill], tokens + max_tokens)
        return None

    def pick_prefill(self, tokens: int, binding: Binding | None = None) -> PrefillClaim | None:
        """Claims the idlest worker that computes prompts, for a prompt of `tokens` alone."""
        idle = [worker for worker in self._admitted(binding) if self._starts_soon(worker)]
        able = [worker for worker in idle if worker.prefills_for_others or worker.prefills_itself]
        if not able:
            return None
        prefill = min(able, key=lambda worker: worker.queued_tokens)
        if binding is not None:
            binding.bind(prefill)
        return PrefillClaim(prefill, tokens)

    def _admitted(self, binding: Binding | None) -> list[Worker]:
        return [worker for worker in self._directory.workers if self._pools.admits(worker, binding)]

    def _prefills(self, decode: Worker, among: Iterable[Worker]) -> list[Worker]:
        return [worker for worker in among if worker.can_prefill_for(decode)]

    def _starts_soon(self, worker: Worker) -> bool:
        return worker.asks_for_work and worker.queued_tokens < self._ahead


def _emptiest_first(worker: Worker, has: int) -> tuple[int, int, int, int]:
    """A worker that prefills for itself comes first by what its cache saves beyond its queue."""
    saves = max(0, has - worker.queued_tokens) if worker.prefills_itself else 0
    return (-saves, -worker.free_slots, worker.promised_tokens, -has)
