"""A worker's entry in the registry, with its load, from its first readiness until it ends.

Nothing blocks on Redis: while it is unavailable the worker serves the routers that know it, and it registers
once Redis is back.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from baton.base.cluster_auth import secret_name
from baton.base.errors import BatonError, NameTakenError
from baton.state import Lease, Member, State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.state import PrefixPublisher
    from baton.state.stores.records import Kept
    from baton.v1.engine_pb2 import PrefixesEvent
    from baton.v1.worker_pb2 import DescribeResponse
    from services.common.config.state import StateConfig
    from services.common.config.worker import WorkerConfig
    from services.worker.front.front_tls import FrontTls
    from services.worker.front.worker_servicer import WorkerServicer

# How long removing the entry may take at the end.
_CLOSE_S = 0.5
# Pause between two looks at a name that may be taken.
_LOOK_S = 0.4


class Registration:
    """One worker's registration: `register`, then `close`. To be constructed within a running event loop;
    raises BatonError(INVALID) for an invalid URL."""

    def __init__(self, config: WorkerConfig, store: StateConfig, tls: FrontTls | None = None) -> None:
        self.state = State.at(
            store.redis_url or "", namespace=store.namespace or "", url_file=store.redis_url_file
        )
        self._config = config
        self._tls = tls
        self._renewals: asyncio.Task[None] | None = None
        self._name = ".".join(part for part in (store.cluster_id, config.name) if part)
        self._listed = asyncio.Event()
        self._lease: Lease | None = None
        self._publisher: PrefixPublisher | None = None

    @property
    def registered(self) -> bool:
        """True if the registry lists this worker, by the latest answer."""
        return self._lease is not None and self._lease.registered.is_set()

    def register(self, model: str, servicer: WorkerServicer, addresses: Mapping[str, str]) -> None:
        """Lists the worker in the registry from now on. `model`: the served model's name."""
        config, described = self._config, servicer.describe()
        member = Member(
            name=self._name,
            incarnation=described.identity.incarnation.hex(),
            role=config.role,
            model=model,
            host=socket.gethostname(),
            group=config.group,
            addresses={kind: address for kind, address in addresses.items() if address},
            fingerprint=described.fingerprint.hex(),
            secret_name=secret_name(config.cluster_secret),
            limits=_limits(described),
        )
        self._lease = self.state.lease(
            member if self._tls is None else self._tls.signed(member),
        )
        if self._tls is not None:
            self._renewals = asyncio.create_task(self._tls.register_renewals(self._lease))
        self._listed.set()

    def publish_prefixes(self, incarnation: bytes, changed: PrefixesEvent) -> None:
        """Publishes the blocks that entered and left the prefix cache to the routers' index; never waits."""
        if self._publisher is None:
            self._publisher = self.state.publish_prefixes(incarnation.hex())
        self._publisher.remove(changed.removed)
        self._publisher.add(changed.added)

    def drain(self) -> None:
        """Marks the worker as draining."""
        if self._lease is not None:
            self._lease.update(self._lease.member.model_copy(update={"draining": True}))

    async def excluded(self) -> BatonError:
        """Returns why this worker has to end: Redis refuses its credentials at its very first start, or
        another worker has its name."""
        tasks = {asyncio.create_task(self._replaced()), asyncio.create_task(self._kept())}
        if not self._config.restarts:  # later it would only cost the cluster a worker
            tasks.add(asyncio.create_task(self.state.refusal()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()

    async def _replaced(self) -> BatonError:
        await self._listed.wait()
        assert self._lease is not None
        await self._lease.replaced.wait()
        assert self._lease.taken is not None
        return self._lease.taken

    async def _kept(self) -> BatonError:
        """Returns once a worker that lives, since it renews its lease, is seen to keep the name; never where
        the name is free, or this worker has asked for it."""
        first: Kept | None = None
        while not self._listed.is_set():
            try:
                kept = await self.state.registry.keeper(self._name)
            except BatonError:
                kept = first
            else:
                if kept is None:
                    break
            if first is not None and kept is not None and _renewed(first, kept):
                return NameTakenError(
                    self._name, kept.member.host, kept.member.addresses.get("grpc", ""), kept=True
                )
            first = first or kept
            await asyncio.sleep(_LOOK_S)
        never: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        return await never

    async def may_have_name(self) -> bool:
        """True if no other worker keeps this one's name, as far as Redis answers."""
        try:
            return await self.state.registry.keeper(self._name) is None
        except BatonError:
            return False

    async def close(self) -> None:
        """Removes the entry where Redis answers at once; otherwise it expires."""
        if self._renewals is not None:
            self._renewals.cancel()
        await self.state.close(_CLOSE_S)


def _renewed(first: Kept, later: Kept) -> bool:
    same = first.member.incarnation == later.member.incarnation
    return same and later.lease_end_ms > first.lease_end_ms


def _limits(described: DescribeResponse) -> dict[str, int]:
    return {
        "slots": described.load.slots,
        "blocks": described.load.blocks,
        "block_tokens": described.load.block_tokens,
        "max_context_tokens": described.max_context_tokens,
        "kv_tokens": described.limits.kv_tokens,
        "vocab_size": described.vocab_size,
    }
