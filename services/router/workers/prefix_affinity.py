"""Which worker has how much of a prompt in its prefix cache, as far as this router knows.

A view of our own, which is all that a placement asks: prompts that were sent to a worker are believed to be
there, as many blocks of them as the worker has, the latest. Where there is an index it is asked beside the
way, and corrects the view when it answers; no request waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from baton.block_hash import BlockHasher
from baton.errors import BatonError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.state import State
    from services.router.workers.worker import Worker

# A prompt of more tokens is named in a thread: here it would hold up every stream for a millisecond and more.
_LONG_TOKENS = 4096
# Questions to the index that may be under way; beyond them a prompt goes without.
_MOST_QUESTIONS = 32
# What was sent to a worker so lately need not be in the index yet.
_UNTOLD_S = 3.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What names a worker's blocks, beside secret and tenant."""

    fingerprint: bytes
    cache_dtype: str
    block_tokens: int

    @classmethod
    def of(cls, worker: Worker) -> Kind | None:
        """None where it caches no prefixes."""
        described = worker.described
        size = described.load.block_tokens
        if not described.cache_dtype or not size:
            return None
        return cls(described.fingerprint, described.cache_dtype, size)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The names of a prompt's full blocks, for each kind of worker. `choice`: whether there are two to choose
    from; with one that prefills and one that decodes nobody asks which of them has what."""

    tokens: int
    choice: bool
    names: dict[Kind, tuple[bytes, ...]] = field(default_factory=dict)

    def of(self, worker: Worker) -> tuple[bytes, ...]:
        kind = Kind.of(worker)
        return () if kind is None else self.names.get(kind, ())


class Prefixes:
    """Of one router, in its loop. Without a secret it knows nothing of anybody."""

    def __init__(
        self, secret: str, workers: Callable[[], Sequence[Worker]], state: State | None = None
    ) -> None:
        self._workers = workers
        self._state = state
        self._secret = secret.encode()
        self._hasher = lru_cache(64)(self._make_hasher)
        # By incarnation: names, least recently used first, and when they were sent or told.
        self._views: dict[bytes, OrderedDict[bytes, float]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def name(self, token_ids: Sequence[int], tenant: str = "") -> Prompt:
        """Hashes a prompt's blocks, once; long ones off the loop. Has the index asked about them. One worker
        alone of its kind finds for itself what it has: for it nothing is done."""
        workers = self._workers()
        alike = Counter((Kind.of(worker), worker.identity.role) for worker in workers)
        prompt = Prompt(len(token_ids), choice=any(count > 1 for count in alike.values()))
        if self._secret:
            kinds = Counter(filter(None, map(Kind.of, workers)))
            for kind in (kind for kind, count in kinds.items() if count > 1):
                hasher = self._hasher(kind, tenant)
                if len(token_ids) > _LONG_TOKENS:
                    prompt.names[kind] = await asyncio.to_thread(hasher.hashes, token_ids)
                else:
                    prompt.names[kind] = hasher.hashes(token_ids)
            if prompt.choice:
                self._ask(prompt)
        return prompt

    def cached_tokens(self, worker: Worker, prompt: Prompt) -> int:
        """How many tokens of a prompt this worker is believed to have; one at least is always computed."""
        names, view = prompt.of(worker), self._views.get(worker.identity.incarnation)
        if not names or not view:
            return 0
        size = worker.described.load.block_tokens
        usable = names[: (prompt.tokens - 1) // size]
        return sum(1 for _ in takewhile(view.__contains__, usable)) * size

    def sent(self, worker: Worker, prompt: Prompt) -> None:
        """The worker will have computed it soon."""
        if prompt.choice and (names := prompt.of(worker)):
            self._believe(worker, names)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def _make_hasher(self, kind: Kind, tenant: str) -> BlockHasher:
        return BlockHasher.of_cache(
            self._secret,
            tenant=tenant,
            fingerprint=kind.fingerprint,
            cache_dtype=kind.cache_dtype,
            block_tokens=kind.block_tokens,
        )

    def _believe(self, worker: Worker, names: Sequence[bytes]) -> None:
        view = self._views.setdefault(worker.identity.incarnation, OrderedDict())
        now = time.monotonic()
        for name in reversed(names):  # the end of a prompt is forgotten before what it hangs on
            view[name] = now
            view.move_to_end(name)
        while len(view) > worker.described.load.blocks:
            view.popitem(last=False)

    def _ask(self, prompt: Prompt) -> None:
        names = max(prompt.names.values(), key=len, default=())
        if (
            self._state is None
            or self._state.unavailable
            or not names
            or len(self._asking) >= _MOST_QUESTIONS
        ):
            return
        task = asyncio.create_task(self._correct(self._state, prompt))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _correct(self, state: State, prompt: Prompt) -> None:
        """Has the view say what the index says."""
        for kind, names in prompt.names.items():
            holders = {w.identity.incarnation.hex(): w for w in self._workers() if Kind.of(w) == kind}
            try:
                found = await state.prefix_index.longest_prefix(names, list(holders))
            except BatonError:
                return  # Redis is away: what we believe has to do
            for holder, worker in holders.items():
                self._told(worker, names, found.get(holder, 0))

    def _told(self, worker: Worker, names: Sequence[bytes], count: int) -> None:
        if count:
            self._believe(worker, names[:count])
        view, old = self._views.get(worker.identity.incarnation), time.monotonic() - _UNTOLD_S
        for name in names[count : count + 1]:  # a chain ends with its first missing block
            if view is not None and view.get(name, old) < old:
                del view[name]

    def forget_lost(self) -> None:
        """Workers came or went: nothing is kept of those that are gone."""
        live = {worker.identity.incarnation for worker in self._workers()}
        for incarnation in self._views.keys() - live:
            del self._views[incarnation]
