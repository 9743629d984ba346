"""Merges two lists of workers into the addresses that the directory watches: the parent's and the registry's.

The parent process knows its own workers first: one that it no longer lists has ended, even if the registry
still has that incarnation. The registry lists workers that others started. A worker that it no longer lists
stays as long as it answers, since it may only have lost its connection to Redis.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from baton.base.addresses import is_loopback, split_address
from baton.state import Member
from services.common.observability.logs import get_log
from services.router.workers.certificates import WorkerCertificates
from services.router.workers.directory import Directory

_WORKERS = ("prefill", "decode", "both")

_log = get_log("discovery")


class Discovery:
    """Updates the addresses of a directory."""

    def __init__(
        self,
        directory: Directory,
        model: str,
        from_parent: Sequence[str] = (),
        secret: str = "",
        certificates: WorkerCertificates | None = None,
    ) -> None:
        """`model`: the served model's name. `from_parent`: addresses that the directory watches already.
        `secret`: the name of this cluster's secret. `certificates`: with TLS, those that registered workers
        may present."""
        self._directory = directory
        self._model = model
        self._secret = secret
        self._certificates = certificates
        # Registered incarnations with another secret, to log each of them once.
        self._foreign: frozenset[str] = frozenset()
        self._host = socket.gethostname()
        self._from_parent = list(from_parent)
        # Incarnation → address of each registered worker that may serve this model.
        self._registered: dict[str, str] = {}
        # Registered incarnations that have ended, as the parent knows.
        self._ended: set[str] = set()

    def set_parent_workers(self, addresses: Sequence[str]) -> None:
        """Replaces the parent process's list of workers."""
        gone = set(self._from_parent) - set(addresses)
        self._ended |= {one for one, address in self._registered.items() if address in gone}
        self._from_parent = list(addresses)
        self._update_directory(gone)

    def set_registered(self, members: Iterable[Member]) -> None:
        """Replaces the registry's list of workers."""
        members = list(members)
        foreign = {one.incarnation: one.name for one in members if one.secret_name != self._secret}
        for incarnation in foreign.keys() - self._foreign:
            _log.warning("worker_secret_mismatch", worker=foreign[incarnation])
        self._foreign = frozenset(foreign)
        if self._certificates is not None:
            self._certificates.set_registered(one for one in members if self._is_ours(one))
        registered = {one.incarnation: one.addresses["grpc"] for one in members if self._may_serve(one)}
        for incarnation in registered.keys() - self._registered.keys():
            _log.debug("worker_registered", incarnation=incarnation, address=registered[incarnation])
        self._registered = registered
        self._directory.set_groups(
            {one.addresses["grpc"]: one.group for one in members if one.incarnation in registered}
        )
        self._ended &= registered.keys()
        self._update_directory(set())

    def _update_directory(self, gone: set[str]) -> None:
        registered = [address for one, address in self._registered.items() if one not in self._ended]
        wanted = dict.fromkeys([*self._from_parent, *registered])
        expiring = [
            address for address in self._directory.peers if address not in wanted | dict.fromkeys(gone)
        ]
        self._directory.set_addresses([*wanted, *expiring], expiring)

    def _may_serve(self, member: Member) -> bool:
        """True for a worker of ours, with a certificate that we trust where TLS is used."""
        trusted = self._certificates is None or self._certificates.presents(member)
        return trusted and self._is_ours(member)

    def _is_ours(self, member: Member) -> bool:
        """True for a worker of our model and cluster at an address that we can reach."""
        address = member.addresses.get("grpc")
        if member.secret_name != self._secret:
            return False
        if address is None or member.role not in _WORKERS or member.rank or member.model != self._model:
            return False
        return member.host == self._host or not is_loopback(split_address(address)[0])
