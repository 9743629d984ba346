"""Every key Baton has in Redis, and how long each lives.

Each concern is one hash tag (the part in braces), so on a Redis Cluster all its keys lie on one
node: a script may touch several of them, and one round trip reads them all.

    {NS.registry}:epoch           string  drawn anew when the registry was found empty
    {NS.registry}:members         hash    name -> incarnation:generation:member as JSON
    {NS.registry}:leases          zset    name -> when its lease ends, ms on the clock of Redis
    {NS.load}:hints               hash    name -> ms:incarnation:values as JSON
    {NS.prefix}:held:HOLDER       set     hashes of the blocks that this incarnation holds
    {NS.journal}:open             zset    request id -> when it ends, ms on the clock of Redis
    {NS.journal}:entry:ID         hash    body (sealed), attempt
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.errors import BatonError, ErrorKind

# A lease is renewed every RENEW_S and lapses after LEASE_S without.
RENEW_S = 1.0
LEASE_S = 5.0
# How often a reader of the registry asks again.
POLL_S = 0.5
# A lapsed member is forgotten after this; until then a newer incarnation still outranks an older one.
FORGET_MEMBER_S = 60.0
# Registry and load hints of a cluster that nobody runs any more.
ABANDONED_S = 24 * 3600.0
# A load hint older than this says nothing.
HINT_S = 10.0
# A holder touches its prefix index every PREFIX_TOUCH_S; without, it is gone after PREFIX_S.
PREFIX_TOUCH_S = 5.0
PREFIX_S = 30.0

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Keys:
    """The keys of one Baton cluster; several share one Redis under different namespaces."""

    namespace: str

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise BatonError(
                ErrorKind.INVALID, "the namespace in Redis is 1 to 64 letters, digits, '_' or '-'"
            )

    @property
    def registry(self) -> list[str]:
        """Epoch, members, leases."""
        return [f"{{{self.namespace}.registry}}:{part}" for part in ("epoch", "members", "leases")]

    @property
    def load_hints(self) -> str:
        """All load hints."""
        return f"{{{self.namespace}.load}}:hints"

    def held(self, holder: str) -> str:
        """The blocks one incarnation holds."""
        return f"{{{self.namespace}.prefix}}:held:{holder}"

    @property
    def journal_open(self) -> str:
        """The open requests."""
        return f"{{{self.namespace}.journal}}:open"

    def journal_entry(self, request_id: bytes) -> str:
        """One accepted request."""
        return f"{{{self.namespace}.journal}}:entry:{request_id.hex()}"
