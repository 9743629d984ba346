"""The keys in Redis and their lifetimes.

Each concern has one hash tag (the part in braces), so that on a Redis Cluster all its keys are on one node
and one script can access them together.

    {NS.registry}:epoch           string  random, new when the registry was empty
    {NS.registry}:members         hash    name -> incarnation:generation:member as JSON
    {NS.registry}:leases          zset    name -> when its lease ends, ms on the clock of Redis
    {NS.registry}:keepers         hash    name -> incarnation that took it from a worker that lived
    {NS.prefix}:blocks:HOLDER     set     hashes of the blocks that this incarnation has cached
    {NS.api-keys}:entries         hash    id -> signature of this entry:API key as JSON
    {NS.api-keys}:version         string  generation:signature of all entries, new with each change of them
    {NS.quotas}:routers           zset    router -> when its leases end, ms on the clock of Redis
    {NS.quotas}:tenant:NAME       hash    level and limit of each bucket, what each router holds of it; slots
    {NS.responses.TENANT}:index   zset    response id -> when it ends, ms on the clock of Redis
    {NS.responses.TENANT}:sizes   hash    response id -> bytes; total -> those of all
    {NS.responses.TENANT}:record:ID  string  a response and its input (sealed)
    {NS.journal}:open             zset    request id -> when it ends, ms on the clock of Redis
    {NS.journal}:entry:ID         hash    body (sealed), attempt
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind

# A lease is renewed every RENEW_S and lapses after LEASE_S without.
RENEW_S = 1.0
LEASE_S = 5.0
# No lease of a member is longer.
MOST_LEASE_S = 120.0
# Poll interval of readers of the registry and of API keys.
POLL_S = 0.5
# A lapsed member is removed after this; until then a newer incarnation outranks an older one.
FORGET_MEMBER_S = 60.0
# Lifetime of the registry of a cluster that has ended.
ABANDONED_S = 24 * 3600.0
# A worker refreshes its prefix index every PREFIX_TOUCH_S; without that it expires after PREFIX_S.
PREFIX_TOUCH_S = 5.0
PREFIX_S = 30.0

# Seconds after its last rebalance from which on a router has ended; what it held is free again.
QUOTA_LEASE_S = 5.0

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster; several clusters share one Redis under different namespaces."""

    namespace: str

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise BatonError(
                ErrorKind.INVALID, "the namespace in Redis is 1 to 64 letters, digits, '_' or '-'"
            )

    @property
    def registry(self) -> list[str]:
        """The keys of epoch, members, leases and keepers."""
        parts = ("epoch", "members", "leases", "keepers")
        return [f"{{{self.namespace}.registry}}:{part}" for part in parts]

    def cached_blocks(self, holder: str) -> str:
        """The key of the blocks that one incarnation has cached."""
        return f"{{{self.namespace}.prefix}}:blocks:{holder}"

    @property
    def api_keys(self) -> list[str]:
        """The keys of the entries of API keys, and of their version."""
        return [f"{{{self.namespace}.api-keys}}:{part}" for part in ("entries", "version")]

    @property
    def quota_routers(self) -> str:
        """The key of the routers that hold leases."""
        return f"{{{self.namespace}.quotas}}:routers"

    def quota(self, tenant: str) -> str:
        """The key of what is left of one tenant's limits."""
        return f"{{{self.namespace}.quotas}}:tenant:{tenant}"

    def responses(self, tenant: str, response_id: str) -> list[str]:
        """The keys of a tenant's index, of the sizes in it, and of one response."""
        tag = f"{{{self.namespace}.responses.{tenant}}}"
        return [f"{tag}:index", f"{tag}:sizes", f"{tag}:record:{response_id}"]

    @property
    def journal_open(self) -> str:
        """The key of the open requests."""
        return f"{{{self.namespace}.journal}}:open"

    def journal_entry(self, request_id: bytes) -> str:
        """The key of one accepted request."""
        return f"{{{self.namespace}.journal}}:entry:{request_id.hex()}"
