"""Endpoints: where a receiver listens, one for each transport it offers, the preferred one first.

    transport  address                    as text
    ipc        NAMESPACE/NAME             ipc:NAMESPACE/NAME     a socket of the same host
    nccl       HOST:PORT                  nccl:HOST:PORT         between GPUs
    grpc       HOST:PORT                  HOST:PORT

The text form is for logs and errors; on the wire endpoints are messages (`baton.v1.Endpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.v1 import types_pb2

IPC, NCCL, GRPC = "ipc", "nccl", "grpc"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which one rank of a receiver listens over one transport.

    `certificates`: with TLS the chains, in PEM, of which its listener presents one. They change while the
    endpoint stays the same one.
    """

    transport: str
    address: str
    rank: int = 0
    certificates: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def reach(self) -> str:
        """The transport and, where it does not leave the host, `:` and what names the host: a sender that
        uses the same reaches the endpoint."""
        return f"{IPC}:{self.address.partition('/')[0]}" if self.transport == IPC else self.transport

    def __str__(self) -> str:
        return self.address if self.transport == GRPC else f"{self.transport}:{self.address}"

    def message(self) -> types_pb2.Endpoint:
        """Converts the endpoint to its message on the wire."""
        return types_pb2.Endpoint(
            transport=self.transport, address=self.address, rank=self.rank, certificates=self.certificates
        )


def from_messages(messages: Iterable[types_pb2.Endpoint]) -> tuple[Endpoint, ...]:
    """The endpoints of a ticket, in their order."""
    return tuple(Endpoint(one.transport, one.address, one.rank, tuple(one.certificates)) for one in messages)


def to_text(endpoints: Iterable[Endpoint]) -> str:
    """Formats endpoints as text, separated by spaces."""
    return " ".join(map(str, endpoints))
