"""Chooses the pair of workers for a request: the decode worker with the most free slots and the least loaded
prefill worker.

A request is placed only if decode has a free slot and prefill will start it soon, so that no slot waits long
for its first token.

Among decode workers that are equally loaded, the one with the most prefix-cache hits is chosen: blocks it has
are not sent. A prefill worker's load is the tokens queued there, less the prompt's cached tokens. So the
longest cached prefix wins, unless that worker's queue is longer by more than the hits save.

Among pairs that are equal by this, one of the same group is chosen: workers of one container, between which
blocks need no network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from services.router.request.request import ClientCall
from services.router.workers.directory import Directory
from services.router.workers.pools import Pools, bind
from services.router.workers.worker import Worker

Cached = Callable[[Worker], int]
MayUse = Callable[[Worker], bool]


class PrefillClaim:
    """A prompt's tokens in this router's counters of a prefill worker. Every method is idempotent."""

    def __init__(self, prefill: Worker, tokens: int) -> None:
        self.prefill = prefill
        self._tokens = tokens
        prefill.queued_tokens += tokens

    def prefill_ended(self) -> None:
        """Releases the tokens: prefill has computed them, or never will."""
        tokens, self._tokens = self._tokens, 0
        self.prefill.queued_tokens -= tokens
        if tokens:
            self.prefill.changed()

    def release(self) -> None:
        """Releases everything."""
        self.prefill_ended()


class Claim(PrefillClaim):
    """A request's share in this router's counters of a pair of workers. The owner calls `release` when
    decode's reservation has ended too."""

    def __init__(self, prefill: Worker, decode: Worker, tokens: int, reserved: int) -> None:
        super().__init__(prefill, tokens)
        self.decode = decode
        self._reserved = reserved
        self._released = False
        decode.claimed_slots += 1
        decode.reserved_tokens += reserved

    @property
    def has_certain_room(self) -> bool:
        """Whether prefill may start before decode has reserved the slot."""
        return self.prefill is not self.decode and self.decode.has_certain_room

    def release(self) -> None:
        """Releases everything, the slot too."""
        super().release()
        if not self._released:
            self._released = True
            self.decode.claimed_slots -= 1
            self.decode.reserved_tokens -= self._reserved
            self.decode.changed()


class Placement:
    """Chooses among the workers of one pool, by this router's own counters, corrected by heartbeats."""

    def __init__(self, directory: Directory, pools: Pools, prefill_ahead_tokens: int) -> None:
        self._directory = directory
        self.pools = pools
        self._ahead = prefill_ahead_tokens

    def usable(self, call: ClientCall | None = None) -> bool:
        """Whether some pair could serve a request of this call, or a new one, now or once it has room."""
        workers = self._admitted(call)
        return any(self._prefills(decode, workers) for decode in workers if decode.alive and decode.decodes)

    def unusable_reason(self) -> str:
        """Why `usable` is false."""
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
        reason = "no prefill worker matches a decode worker"
        prefill = {worker.described.pool.kv_format for worker in members if worker.prefills_for_others}
        decode = {worker.described.pool.kv_format for worker in members if worker.decodes}
        if prefill.isdisjoint(decode):
            reason += f": their KV formats are {', '.join(sorted(prefill))} and {', '.join(sorted(decode))}"
        return reason

    def pick(
        self,
        tokens: int,
        max_tokens: int,
        cached: Cached = lambda worker: 0,
        call: ClientCall | None = None,
        may_use: MayUse = lambda worker: True,
    ) -> Claim | None:
        """Claims the best pair with room for `tokens` to prefill, and binds the call to its pool. None if no
        pair has room.

        `cached`: how many of the tokens a worker has cached; called once for each worker. `may_use`: whether
        the request may use a decode worker with a free slot.
        """
        hits = {worker: cached(worker) for worker in self._admitted(call)}
        ordered = sorted(hits, key=lambda worker: _decode_order(worker, hits[worker]))
        for place, decode in enumerate(ordered):
            if not _has_room(decode, may_use):
                continue
            idle = [worker for worker in self._prefills(decode, hits) if self._starts_soon(worker)]
            if idle:
                prefill = min(idle, key=partial(_prefill_order, decode, hits))
                if prefill.group != decode.group:
                    decode = _nearest(prefill, ordered[place:], hits, may_use)
                bind(call, prefill, decode)
                return Claim(prefill, decode, tokens - hits[prefill], tokens + max_tokens)
        return None

    def pick_prefill(self, tokens: int, call: ClientCall | None = None) -> PrefillClaim | None:
        """Claims the least loaded worker that computes prompts, for a prompt of `tokens` without output."""
        idle = [worker for worker in self._admitted(call) if self._starts_soon(worker)]
        able = [worker for worker in idle if worker.prefills_for_others or worker.prefills_itself]
        if not able:
            return None
        prefill = min(able, key=lambda worker: worker.queued_tokens)
        bind(call, prefill)
        return PrefillClaim(prefill, tokens)

    def _admitted(self, call: ClientCall | None) -> list[Worker]:
        return [worker for worker in self._directory.workers if self.pools.admits(worker, call)]

    def _prefills(self, decode: Worker, among: Iterable[Worker]) -> list[Worker]:
        return [worker for worker in among if worker.can_prefill_for(decode)]

    def _starts_soon(self, worker: Worker) -> bool:
        return worker.accepts_work and worker.queued_tokens < self._ahead


def _has_room(decode: Worker, may_use: MayUse) -> bool:
    return decode.decodes and decode.accepts_work and decode.free_slots > 0 and may_use(decode)


def _prefill_order(decode: Worker, hits: Mapping[Worker, int], prefill: Worker) -> tuple[int, bool]:
    """Sort key: load, then distance."""
    return (prefill.queued_tokens - hits[prefill], prefill.group != decode.group)


def _nearest(
    prefill: Worker, ordered: Sequence[Worker], hits: Mapping[Worker, int], may_use: MayUse
) -> Worker:
    """The first decode worker, or one that is equal to it and of the group of `prefill`."""
    first = ordered[0]
    order = _decode_order(first, hits[first])
    for decode in itertools.takewhile(lambda one: _decode_order(one, hits[one]) == order, ordered):
        near = decode.group == prefill.group and prefill.can_prefill_for(decode)
        if near and _has_room(decode, may_use):
            return decode
    return first


def _decode_order(worker: Worker, hits: int) -> tuple[int, int, int, int]:
    """Sort key: first what a combined worker's cache saves beyond its queue, then free slots."""
    saves = max(0, hits - worker.queued_tokens) if worker.prefills_itself else 0
    return (-saves, -worker.free_slots, worker.reserved_tokens, -hits)
