"""Selects the pool of workers that serves this router's model.

The workers of a pool have everything in common that a request must not see change between attempts: served
name, checkpoint, tokenizer, KV format and numerics (`Pool` in worker.proto). A router serves its model from
one pool, the *current* one: the configured one, or else the first that could serve a request. It stays
current, with or without workers, until an operator switches. Within a pool each role has one weight format;
roles may differ.

A request is bound to the pool of its first attempt, and to the weight formats that it has used there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.v1.admin_pb2 import PoolStatus
from services.common.observability.logs import get_log
from services.router.placement.announced import Announced
from services.router.placement.ready_pairs import some_pair
from services.router.request.request import ClientCall
from services.router.workers.worker import Worker

_log = get_log("pools")


class Pools:
    """The pools of a router. Call `review` after each change of any worker."""

    def __init__(
        self,
        model: str,
        tokenizer: bytes,
        configured: str | None,
        workers: Callable[[], Sequence[Worker]],
        keep_s: float = 0.0,
    ) -> None:
        """`tokenizer`: the digest of the router's own; workers with another one get no work. `workers`:
        returns all that are not lost. `keep_s`: how long limits are announced once no pair has them."""
        # The limits of the pairs that new requests may use.
        self.announced = Announced(self.members, keep_s)
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self.current = configured
        # Weight formats of the current pool by role (key: whether it decodes), once it has had a live worker.
        self._formats: dict[bool, str] = {}
        # Whether there are, or were, workers of more than one pool.
        self.several = False
        # At the last review: workers, whether they were alive, changes of their links. None forces another.
        self._seen: list[tuple[Worker, bool, int]] | None = None
        # Grows with each change of these.
        self.version = 0
        # The smallest vocabulary in the current pool; None without workers.
        self.vocab_size: int | None = None

    def members(self) -> list[Worker]:
        """The workers that new requests may use."""
        return [worker for worker in self._workers() if worker.serves]

    def review(self) -> bool:
        """Chooses the current pool if there is none, marks the workers that belong to it, and takes their
        limits. Returns False where nothing but the load of workers has changed since the last review."""
        workers = self._workers()
        seen = [(worker, worker.alive, worker.links.changes) for worker in workers]
        if seen == self._seen:
            return False
        self._seen = seen
        self.version += 1
        if self.current is None:
            ready = next((worker.pool for worker in workers if self.ready(worker.pool)), None)
            if ready is not None:
                self._make_current(ready)
        self._update_formats([worker for worker in workers if worker.pool == self.current])
        self.several |= len({self.current, *(worker.pool for worker in workers)} - {None}) > 1
        for worker in workers:
            worker.serves = self._serves(worker)
        self.vocab_size = min((worker.described.vocab_size for worker in self.members()), default=None)
        self.announced.review()
        return True

    def admits(self, worker: Worker, call: ClientCall | None = None) -> bool:
        """True if a request of this call, or a new one, may use this worker."""
        if call is None or call.pool is None:
            return worker.serves and self.current is not None
        wanted = call.formats.get(worker.decodes)
        if wanted is None and call.pool == self.current:
            wanted = self._formats.get(worker.decodes)
        return worker.pool == call.pool and wanted in (None, worker.weight_format)

    def ready(self, pool: str) -> bool:
        """True if a pair of this pool could serve a request."""
        return some_pair(
            worker for worker in self._workers() if worker.pool == pool and self.compatible(worker)
        )

    def compatible(self, worker: Worker) -> bool:
        """True if a worker has this router's model and tokenizer."""
        pool = worker.described.pool
        return pool.model == self._model and pool.tokenizer == self._tokenizer

    def switch(self, pool: str) -> None:
        """Makes new requests use another pool; running ones stay in theirs. Raises BatonError: NOT_FOUND for
        a pool without workers, CONFLICT for one that this router cannot use or that is not ready.

        Raises BatonError: NOT_FOUND for a pool without workers, CONFLICT for one that this router cannot use
        or that is not ready.
        """
        members = [worker for worker in self._workers() if worker.pool == pool]
        if not members:
            raise BatonError(ErrorKind.NOT_FOUND, f"no worker belongs to a pool {pool!r}")
        if not self.compatible(members[0]):
            raise BatonError(
                ErrorKind.CONFLICT, f"pool {pool} has another served name or tokenizer than this router"
            )
        if not self.ready(pool):
            raise BatonError(ErrorKind.CONFLICT, f"pool {pool} has no pair of workers that is ready")
        if pool != self.current:
            self._make_current(pool)
        self.review()

    def status(self) -> list[PoolStatus]:
        """The status of the current pool and of every pool with workers."""
        found: dict[str, PoolStatus] = {}
        if self.current is not None:
            found[self.current] = PoolStatus(id=self.current, current=True)
        for worker in self._workers():
            pool = found.setdefault(worker.pool, PoolStatus(id=worker.pool))
            pool.pool.CopyFrom(worker.described.pool)
            pool.compatible = self.compatible(worker)
            pool.workers += 1
            pool.running += worker.claimed_slots + worker.others.siblings.slots
        for pool in found.values():
            pool.ready = self.ready(pool.id)
        return list(found.values())

    def _make_current(self, pool: str) -> None:
        _log.info("pool_selected", pool=pool, before=self.current)
        self.current = pool
        self._formats.clear()
        self._seen = None

    def _update_formats(self, members: Sequence[Worker]) -> None:
        """The first live worker of a role decides the format, which stays until no live worker has it."""
        for decodes in (False, True):
            live = [worker.weight_format for worker in members if worker.alive and worker.decodes == decodes]
            if live and self._formats.get(decodes) not in live:
                self._formats[decodes] = live[0]

    def _serves(self, worker: Worker) -> bool:
        if not self.compatible(worker):
            return False
        wanted = self._formats.get(worker.decodes, worker.weight_format)
        return self.current in (None, worker.pool) and worker.weight_format == wanted


def bind(call: ClientCall | None, *workers: Worker) -> None:
    """Records that an attempt of the call is placed on these workers: later ones stay in their pool."""
    if call is not None:
        for worker in workers:
            call.pool = worker.pool
            call.formats[worker.decodes] = worker.weight_format
