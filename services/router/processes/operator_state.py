"""Keeps operators' changes the same at all processes of a router.

One process serves AdminService. It relays drains of workers and of the router, and the current pool, whenever
they change; the other processes, and those that are started later, apply them. What names a worker or a pool
that a process has not found yet is applied once it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.base.errors import BatonError
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.placement.pools import Pools
from services.router.workers.directory import Directory


class OperatorState:
    """Operators' changes as one process knows them. Call `review` after each change of any worker, of
    draining, or of the pool."""

    def __init__(
        self,
        directory: Directory,
        dispatcher: Dispatcher,
        pools: Pools,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._pools = pools
        self._relay: Callable[[Mapping[str, Any]], None] | None = None
        self._relayed: Mapping[str, Any] = {}
        self._relays = False
        # What was received and could not be applied yet.
        self._pool: str | None = None
        self._drained: frozenset[str] = frozenset()

    def relay_by(self, relay: Callable[[Mapping[str, Any]], None]) -> None:
        """Starts to relay changes, since this process serves AdminService: `relay` sends a message to the
        others, once `begin` was called."""
        self._relay = relay
        self.review()

    def begin(self) -> None:
        """Starts to send messages: the parent knows that this process is ready."""
        self._relays = True
        self.review()

    def receive(self, message: Mapping[str, Any]) -> None:
        """Takes a message of the parent."""
        self._pool = message.get("pool") or self._pool
        if "router_drained" in message:
            self._dispatcher.set_draining(message["router_drained"])
        if "drained_workers" in message:
            self._drained = frozenset(message["drained_workers"])
            for worker in self._directory.workers:
                drained = worker.identity.incarnation.hex() in self._drained
                if worker.drained_by_operator != drained:
                    worker.set_drained(drained)
        self.review()

    def review(self) -> None:
        """Applies what is left, and relays what has changed."""
        if self._pool is not None:
            self._switch(self._pool)
        found = {worker.identity.incarnation.hex(): worker for worker in self._directory.workers}
        for incarnation in self._drained & found.keys():
            self._drained -= {incarnation}
            if not found[incarnation].drained_by_operator:
                found[incarnation].set_drained(True)
        if self._relay is not None and self._relays and not self._dispatcher.leaving:
            self._relay_changes(self._relay)

    def _switch(self, pool: str) -> None:
        try:
            if self._pools.current != pool:
                self._pools.switch(pool)
        except BatonError:
            return  # its workers were not found yet
        self._pool = None

    def _relay_changes(self, relay: Callable[[Mapping[str, Any]], None]) -> None:
        drained = {w.identity.incarnation.hex() for w in self._directory.workers if w.drained_by_operator}
        state = {
            "pool": self._pool or self._pools.current,
            "router_drained": self._dispatcher.draining,
            "drained_workers": sorted(drained | self._drained),
        }
        if state != self._relayed:
            self._relayed = state
            relay(state)
