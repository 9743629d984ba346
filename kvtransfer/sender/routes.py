"""From a ticket's address to the transports that a sender tries, in this order.

A receiver that can be reached in several ways names them all, the best first, with spaces between:
`ipc:REALM/NAME` within its host, `nccl:HOST:PORT` between GPUs, `HOST:PORT` over grpc. A way that leads
nowhere from here is no way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import BatonError, ErrorKind
from kvtransfer.link.interfaces import Connector


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a receiver."""

    connector: Connector
    address: str

    @property
    def transport(self) -> str:
        return self.connector.transport


def routes(address: str, connectors: Sequence[Connector]) -> tuple[Route, ...]:
    """Every way there is, in the receiver's order. `BatonError` CONFLICT where there is none."""
    found = tuple(
        Route(connector, way) for way in address.split() for connector in connectors if connector.takes(way)
    )
    if not found:
        ours = ", ".join(connector.transport for connector in connectors)
        raise BatonError(ErrorKind.CONFLICT, f"the receiver at {address!r} cannot be reached over {ours}")
    return found
