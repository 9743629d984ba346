"""Finds a router's AdminService, and the router that an AdminService belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.base.addresses import is_loopback

if TYPE_CHECKING:
    from baton.v1.admin_pb2 import AdminServiceGetStatusResponse

DEFAULT_GRPC_PORT = 50052
DEFAULT_HTTP_PORT = 8001
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_GRPC_PORT}"


def belongs_to(status: AdminServiceGetStatusResponse, target: str) -> bool:
    """True if the router that gave this status, asked on loopback, serves `target` (a host:port) too.

    It does if `target` is on loopback and names one of the router's public ports. On another host the same
    port number may be another router's.
    """
    host, _, port = target.rpartition(":")
    public = (status.grpc_address, status.http_address)
    return is_loopback(host) and port in {address.rpartition(":")[2] for address in public if address}
