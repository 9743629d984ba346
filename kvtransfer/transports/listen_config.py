"""Configuration of where and how a receiver listens for links."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.grpc.tls import LinkTls
from kvtransfer.transports.nccl.endpoint import NcclEndpoint


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Addresses and transport of a receiver. `host`: the address that senders are told, at which ports are
    bound too unless `listen_host` names another, such as `::` for all. `transport`: a transport's name, or
    `auto` for all that this process can use. Where there are several, grpc uses `port` (0: any free one);
    `frames_port` is nccl's second port. `nccl`: this process's NCCL; `auth`: what senders must prove to know;
    `tls`: of connections over gRPC."""

    host: str
    port: int = 0
    transport: str = "grpc"
    nccl: NcclEndpoint | None = None
    auth: LinkAuth | None = None
    frames_port: int = 0
    tls: LinkTls | None = None
    listen_host: str | None = None
