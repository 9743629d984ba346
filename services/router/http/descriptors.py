"""The number of connections that the process's limit on file descriptors allows.

The listeners together stay below the limit, so that connections to workers and to Redis can always be opened.
"""

from __future__ import annotations

import resource

from baton.base.errors import BatonError, ErrorKind
from services.common.config.router import ConnectionLimits
from services.common.observability.logs import get_log
from services.router.http.connections import RESERVE

# Descriptors for workers, Redis, files, and connections that are accepted but not counted yet.
_SPARE = 1024
# Limits of the admin listeners, for operators, scrapers and probes, which may all have one address
# (loopback).
ADMIN_LIMITS = ConnectionLimits(
    max_connections=16, max_connections_per_address=16, max_grpc_connections=16, max_buffered_body_mb=1
)
_ADMIN = ADMIN_LIMITS.max_connections + ADMIN_LIMITS.grpc_connections + RESERVE
_LEAST_CONNECTIONS = 16

_log = get_log("router")


def raise_descriptor_limit(limits: ConnectionLimits) -> None:
    """Raises the soft limit to what the configured connections need, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + limits.grpc_connections + RESERVE + _ADMIN + _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def within_descriptors(limits: ConnectionLimits) -> ConnectionLimits:
    """The configured limits, with fewer connections if the descriptor limit is low; BatonError(INVALID) if it
    is too low to serve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + limits.grpc_connections
    spare = RESERVE + _ADMIN + min(_SPARE, soft // 3)
    if soft == resource.RLIM_INFINITY or wanted + spare <= soft:
        return limits
    left = soft - spare
    if left < _LEAST_CONNECTIONS:
        raise BatonError(ErrorKind.INVALID, f"a limit of {soft} open files is too low for the router")
    http = max(1, left * limits.max_connections // wanted)
    grpc = max(1, left * limits.grpc_connections // wanted)
    _log.warning("descriptor_limit_low", limit=soft, http_connections=http, grpc_connections=grpc)
    return limits.model_copy(update={"max_connections": http, "max_grpc_connections": grpc})
