"""Which addresses the directory watches: the parent's workers, and those that the registry lists.

The parent is the quick way: what it no longer names has ended, at once, whatever the registry still says of
that incarnation. The registry is how workers of others are found. It ends nobody: one that is no longer
listed stays for as long as it answers, since it may only have lost its Redis.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from baton.addresses import is_loopback, split_address
from services.common.observability.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.state import Member
    from services.router.workers.directory import Directory

_WORKERS = ("prefill", "decode", "both")

_log = get_log("discovery")


class Discovery:
    """Tells the directory. `model` is what clients call the model served here, `told` what the directory
    watches already, `secret` the name of our cluster's secret."""

    def __init__(self, directory: Directory, model: str, told: Sequence[str] = (), secret: str = "") -> None:
        self._directory = directory
        self._model = model
        self._secret = secret
        # Listed incarnations that do not share our secret, each logged once.
        self._foreign: frozenset[str] = frozenset()
        self._host = socket.gethostname()
        self._told = list(told)
        # By incarnation: the address of each listed worker that may serve here.
        self._listed: dict[str, str] = {}
        # Listed incarnations of which the parent knows better.
        self._ended: set[str] = set()

    def tell(self, addresses: Sequence[str]) -> None:
        """The parent's list, whole, in its order."""
        gone = set(self._told) - set(addresses)
        self._ended |= {one for one, address in self._listed.items() if address in gone}
        self._told = list(addresses)
        self._watch(gone)

    def take(self, members: Iterable[Member]) -> None:
        """The registry's list, whole."""
        members = list(members)
        foreign = {one.incarnation: one.name for one in members if one.secret_name != self._secret}
        for incarnation in foreign.keys() - self._foreign:
            _log.warning("worker_of_another_secret", worker=foreign[incarnation])
        self._foreign = frozenset(foreign)
        listed = {one.incarnation: one.addresses["grpc"] for one in members if self._may_serve(one)}
        for incarnation in listed.keys() - self._listed.keys():
            _log.debug("worker_registered", incarnation=incarnation, address=listed[incarnation])
        self._listed = listed
        self._ended &= listed.keys()
        self._watch(set())

    def _watch(self, gone: set[str]) -> None:
        listed = [address for one, address in self._listed.items() if one not in self._ended]
        wanted = dict.fromkeys([*self._told, *listed])
        lapsed = [address for address in self._directory.peers if address not in wanted | dict.fromkeys(gone)]
        self._directory.set_addresses([*wanted, *lapsed], lapsed)

    def _may_serve(self, member: Member) -> bool:
        """A worker of our model and secret, where we can reach it."""
        address = member.addresses.get("grpc")
        if member.secret_name != self._secret:
            return False
        if address is None or member.role not in _WORKERS or member.rank or member.model != self._model:
            return False
        return member.host == self._host or not is_loopback(split_address(address)[0])
