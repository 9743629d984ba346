"""Which pool of workers serves this router's model, and which workers belong to it.

A pool is all that must be equal between workers for a request to pass from one to another and still be
answered by one model: served name, source checkpoint, tokenizer, KV format, numerics (`Pool` in
worker.proto). A router serves its model's name from one pool, the *current* one: the configured one, or
else the first that could serve a request. It stays current, with or without workers, until an operator
switches. Within a pool each role has one weight format; roles may differ.

A request is bound to the pool of its first attempt, and to the weight formats that it has met there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import BatonError, ErrorKind
from baton.v1.admin_pb2 import PoolStatus
from services.common.observability.logs import get_log
from services.router.request.pool import Binding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.router.workers.worker import Worker


_log = get_log("pools")


class Pools:
    """The current pool of one router. `review` is called after each change of any worker."""

    def __init__(
        self, model: str, tokenizer: bytes, configured: str | None, workers: Callable[[], Sequence[Worker]]
    ) -> None:
        """`tokenizer`: the router's own digest; a worker with another one gets no work. `workers`: all that
        are not lost."""
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self.current = configured
        # Of the current pool's roles (key: whether it decodes) that have had a live worker.
        self._formats: dict[bool, str] = {}
        # Whether there are workers of more than one pool, or were.
        self.several = False
        # Workers and whether they were alive at the last review; None: it is to be repeated.
        self._seen: list[tuple[Worker, bool]] | None = None

    @property
    def max_context_tokens(self) -> int | None:
        """The shortest context in the current pool; None where it has no workers."""
        return min((worker.described.max_context_tokens for worker in self.members()), default=None)

    @property
    def vocab_size(self) -> int | None:
        """The smallest vocabulary in the current pool; None where it has no workers."""
        return min((worker.described.vocab_size for worker in self.members()), default=None)

    def members(self) -> list[Worker]:
        """The workers that new requests may use."""
        return [worker for worker in self._workers() if worker.serves]

    def review(self) -> None:
        """Chooses a pool where none is current yet, and marks the workers that belong to the current one."""
        workers = self._workers()
        seen = [(worker, worker.alive) for worker in workers]
        if seen == self._seen:
            return  # only how much room they have is different
        self._seen = seen
        if self.current is None:
            ready = next((worker.pool for worker in workers if self.ready(worker.pool)), None)
            if ready is not None:
                self._make_current(ready)
        self._keep_formats([worker for worker in workers if worker.pool == self.current])
        self.several |= len({self.current, *(worker.pool for worker in workers)} - {None}) > 1
        for worker in workers:
            worker.serves = self._serves(worker)

    def admits(self, worker: Worker, binding: Binding | None = None) -> bool:
        """Whether a request may use this worker."""
        if binding is None or binding.pool is None:
            return worker.serves and self.current is not None
        wanted = binding.format_of(worker)
        if wanted is None and binding.pool == self.current:
            wanted = self._formats.get(worker.decodes)
        return worker.pool == binding.pool and wanted in (None, worker.weight_format)

    def ready(self, pool: str) -> bool:
        """Whether workers of this pool could serve a request."""
        members = [worker for worker in self._workers() if worker.pool == pool and self.compatible(worker)]
        return any(
            decode.alive and decode.decodes and any(worker.can_prefill_for(decode) for worker in members)
            for decode in members
        )

    def compatible(self, worker: Worker) -> bool:
        """Whether a worker serves this router's model and splits text into the same tokens."""
        pool = worker.described.pool
        return pool.model == self._model and pool.tokenizer == self._tokenizer

    def switch(self, pool: str) -> None:
        """Sends new requests to another pool; those that run end where they began.

        Raises BatonError: NOT_FOUND for a pool without workers, CONFLICT for one that this router cannot
        serve from, or that is not ready.
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
        """Every pool that has workers, and the current one, in the order in which they were found."""
        found: dict[str, PoolStatus] = {}
        if self.current is not None:
            found[self.current] = PoolStatus(id=self.current, current=True)
        for worker in self._workers():
            pool = found.setdefault(worker.pool, PoolStatus(id=worker.pool))
            pool.pool.CopyFrom(worker.described.pool)
            pool.compatible = self.compatible(worker)
            pool.workers += 1
            pool.running += worker.claimed_slots
        for pool in found.values():
            pool.ready = self.ready(pool.id)
        return list(found.values())

    def _make_current(self, pool: str) -> None:
        _log.info("pool_current", pool=pool, before=self.current)
        self.current = pool
        self._formats.clear()
        self._seen = None

    def _keep_formats(self, members: Sequence[Worker]) -> None:
        """The first live worker of a role decides its weight format, until none with it is left."""
        for decodes in (False, True):
            live = [worker.weight_format for worker in members if worker.alive and worker.decodes == decodes]
            if live and self._formats.get(decodes) not in live:
                self._formats[decodes] = live[0]

    def _serves(self, worker: Worker) -> bool:
        if not self.compatible(worker):
            return False
        wanted = self._formats.get(worker.decodes, worker.weight_format)
        return self.current in (None, worker.pool) and worker.weight_format == wanted
