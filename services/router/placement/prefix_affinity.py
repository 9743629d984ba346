"""Estimates how much of a prompt each worker has in its prefix cache.

Placement uses only this router's own view: a prompt that was sent to a worker is assumed to be cached there,
and so is the output that a worker has decoded, without its last token, which has no KV; limited to the blocks
that the worker has, least recently used first out. If there is a shared prefix index, it is queried in the
background and corrects the view when it answers; no request waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

from baton.base.errors import BatonError
from baton.model_spec.block_hash import BlockHasher
from baton.state import State
from services.router.workers.worker import Worker

# Longer prompts and outputs are hashed in a thread: on the event loop they would delay every stream by 1 ms
# or more.
LONG_TOKENS = 4096
# Concurrent queries of the index; prompts beyond that are not looked up.
_MAX_QUERIES = 32
# Long outputs that are hashed at a time; the view does not learn those beyond that.
MAX_OUTPUTS = 32
# Number of hashers that are kept, one for each kind of cache and tenant.
_HASHERS = 1024
# The index may not know yet what was sent to a worker so recently.
_INDEX_DELAY_S = 3.0


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Properties of a worker that its block hashes depend on, besides secret and tenant."""

    fingerprint: bytes
    cache_dtype: str
    block_tokens: int

    @classmethod
    def of(cls, worker: Worker) -> CacheKind | None:
        """The kind of a worker's cache; None if it has none."""
        described = worker.described
        if not worker.caches_prefixes:
            return None
        return cls(described.fingerprint, described.cache_dtype, described.load.block_tokens)


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Hashes of a prompt's full blocks, for each kind of cache."""

    tokens: int
    tenant: str = ""
    hashes: dict[CacheKind, tuple[bytes, ...]] = field(default_factory=dict)

    def hashes_for(self, worker: Worker) -> tuple[bytes, ...]:
        kind = CacheKind.of(worker)
        return () if kind is None else self.hashes.get(kind, ())


class PrefixAffinity:
    """This router's view of the workers' prefix caches. Used on the event loop only; empty without a
    secret."""

    def __init__(
        self,
        secret: str,
        workers: Callable[[], Sequence[Worker]],
        state: State | None = None,
        long_tokens: int = LONG_TOKENS,
        max_outputs: int = MAX_OUTPUTS,
    ) -> None:
        self._long_tokens = long_tokens
        self._max_outputs = max_outputs
        self._workers = workers
        self._state = state
        self._secret = secret.encode()
        self._hasher = lru_cache(_HASHERS)(self._make_hasher)
        # Incarnation → block hashes, least recently used first, with the time when they were sent or
        # confirmed.
        self._views: dict[bytes, OrderedDict[bytes, float]] = {}
        self._queries: set[asyncio.Task[None]] = set()
        self._outputs: set[asyncio.Task[None]] = set()
        # Called with each prompt that was sent to a worker, and each sequence that one has decoded: the
        # hashes of its blocks.
        self.on_sent: Callable[[Worker, Sequence[bytes]], None] = lambda worker, hashes: None

    async def hash_prompt(self, token_ids: Sequence[int], tenant: str = "") -> PromptBlocks:
        """Hashes a prompt's blocks, long prompts in a thread, and starts a query of the index. Also for a
        worker that there is no other beside: how many prompts it may have queued depends on what it has
        cached."""
        prompt = PromptBlocks(len(token_ids), tenant)
        if self._secret:
            for kind in set(filter(None, map(CacheKind.of, self._workers()))):
                hasher = self._hasher(kind, tenant)
                if len(token_ids) > self._long_tokens:
                    prompt.hashes[kind] = await asyncio.to_thread(hasher.hashes, token_ids)
                else:
                    prompt.hashes[kind] = hasher.hashes(token_ids)
            self._query_index(prompt)
        return prompt

    def cached_tokens(self, worker: Worker, prompt: PromptBlocks) -> int:
        """Estimated number of a prompt's tokens that this worker has cached. The last token is always
        computed."""
        hashes, view = prompt.hashes_for(worker), self._views.get(worker.identity.incarnation)
        if not hashes or not view:
            return 0
        size = worker.described.load.block_tokens
        usable = hashes[: (prompt.tokens - 1) // size]
        return sum(1 for _ in takewhile(view.__contains__, usable)) * size

    def prompt_sent(self, worker: Worker, prompt: PromptBlocks) -> None:
        """Adds a prompt that the worker will have computed soon."""
        if hashes := prompt.hashes_for(worker):
            self._computed(worker, hashes)

    def output_ended(
        self, worker: Worker, prompt: PromptBlocks, prompt_ids: Sequence[int], output: Sequence[int]
    ) -> None:
        """Adds the blocks of a sequence that the worker has decoded to its end. `prompt`: of `prompt_ids`.
        `output`: all of its tokens. A long output is added later, once it is hashed."""
        kind = CacheKind.of(worker)
        if kind is None or kind not in prompt.hashes or worker.lost:
            return
        known, hasher = prompt.hashes[kind], self._hasher(kind, prompt.tenant)
        rest = (*prompt_ids[len(known) * kind.block_tokens :], *output[:-1])
        if len(rest) > self._long_tokens:
            if len(self._outputs) < self._max_outputs:
                task = asyncio.create_task(self._add_long(worker, hasher, known, rest))
                self._outputs.add(task)
                task.add_done_callback(self._outputs.discard)
        elif more := hasher.more_hashes(rest, known):
            self._computed(worker, (*known, *more))

    async def _add_long(
        self, worker: Worker, hasher: BlockHasher, known: Sequence[bytes], rest: Sequence[int]
    ) -> None:
        more = await asyncio.to_thread(hasher.more_hashes, rest, known)
        if not worker.lost:
            self._computed(worker, (*known, *more))

    def _computed(self, worker: Worker, hashes: Sequence[bytes]) -> None:
        """Adds blocks that the worker has cached, or soon will, to this view and to sibling processes'."""
        self._add(worker, hashes)
        self.on_sent(worker, hashes)

    def sibling_sent(self, worker: Worker, hashes: Sequence[bytes]) -> None:
        """Adds what a sibling process has sent to the worker, or had decoded by it."""
        self._add(worker, hashes)

    async def close(self) -> None:
        """Cancels running queries, and what is being hashed."""
        tasks = self._queries | self._outputs
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_hasher(self, kind: CacheKind, tenant: str) -> BlockHasher:
        return BlockHasher(
            self._secret,
            tenant=tenant,
            fingerprint=kind.fingerprint,
            cache_dtype=kind.cache_dtype,
            block_tokens=kind.block_tokens,
        )

    def _add(self, worker: Worker, hashes: Sequence[bytes]) -> None:
        view = self._views.setdefault(worker.identity.incarnation, OrderedDict())
        now = time.monotonic()
        for block_hash in reversed(hashes):  # the end of a prompt is evicted before its beginning
            view[block_hash] = now
            view.move_to_end(block_hash)
        while len(view) > worker.described.load.blocks:
            view.popitem(last=False)

    def _query_index(self, prompt: PromptBlocks) -> None:
        hashes = max(prompt.hashes.values(), key=len, default=())
        if self._state is None or self._state.unavailable or not hashes or len(self._queries) >= _MAX_QUERIES:
            return
        task = asyncio.create_task(self._correct(self._state, prompt))
        self._queries.add(task)
        task.add_done_callback(self._queries.discard)

    async def _correct(self, state: State, prompt: PromptBlocks) -> None:
        """Queries the index and updates the view."""
        for kind, hashes in prompt.hashes.items():
            holders = {w.identity.incarnation.hex(): w for w in self._workers() if CacheKind.of(w) == kind}
            try:
                found = await state.prefix_index.longest_prefix(hashes, list(holders))
            except BatonError:
                return  # Redis is unavailable: the view stays as it is
            for holder, worker in holders.items():
                self._update(worker, hashes, found.get(holder, 0))

    def _update(self, worker: Worker, hashes: Sequence[bytes], count: int) -> None:
        """Corrects the view: the index has the first `count` blocks at this worker."""
        if count:
            self._add(worker, hashes[:count])
        view, old = self._views.get(worker.identity.incarnation), time.monotonic() - _INDEX_DELAY_S
        for block_hash in hashes[count : count + 1]:  # the chain ends with its first missing block
            if view is not None and view.get(block_hash, old) < old:
                del view[block_hash]

    def forget_lost(self) -> None:
        """Drops the views of workers that are gone."""
        live = {worker.identity.incarnation for worker in self._workers()}
        for incarnation in self._views.keys() - live:
            del self._views[incarnation]
