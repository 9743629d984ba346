"""Limits of what clients may use of the router: connections, headers, bodies, unread output."""

from __future__ import annotations

from pydantic import Field

from services.common.config.strict_model import StrictModel


class ConnectionLimits(StrictModel):
    """Limits of the public listeners. Above a limit the client gets 431, 408 or 503, or is disconnected."""

    max_head_bytes: int = Field(16_384, ge=1024, le=1024 * 1024)
    """Bytes of a request line and headers, or of a gRPC call's metadata."""
    max_headers: int = Field(100, ge=8, le=10_000)
    """Headers of one HTTP request."""
    head_timeout_s: float = Field(10.0, gt=0)
    """Longest time for the headers of a request, or the handshake of a gRPC connection."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Longest time from the end of the headers to the end of the body."""
    # Must exceed the time for which common clients keep idle connections (httpx 5 s, aiohttp 15 s, load
    # balancers 60 s): a request that is sent while the router closes the connection is lost.
    idle_timeout_s: float = Field(75.0, gt=0)
    """An idle connection is closed after so long."""
    write_timeout_s: float = Field(60.0, gt=0)
    """Longest wait for a client that does not read; a streamed response may wait until the request's
    deadline."""
    read_grace_s: float = Field(5.0, ge=0)
    """Time after its deadline that a client has to read the rest of its response."""
    max_connections: int = Field(4096, ge=8)
    """Open HTTP connections; fewer where the limit of file descriptors is low."""
    max_connections_per_address: int | None = Field(None, ge=1)
    """Open HTTP connections of one client address (IPv6: one /64 network); unset: half of all."""
    max_grpc_connections: int = Field(1024, ge=8)
    """Open gRPC connections; fewer where the limit of file descriptors is low."""
    max_unread_mb: int = Field(256, ge=1)
    """Memory for output that clients have not read yet, of all requests."""
    max_buffered_body_mb: int = Field(256, ge=1)
    """Memory for request bodies that have not arrived in full, of all connections."""
