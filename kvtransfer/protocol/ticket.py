"""Transfer tickets: a body and its issuer's HMAC.

A ticket is opaque to those who forward it. Its issuer signs it with a secret drawn when its process starts,
so a ticket of an earlier incarnation fails verification like a forged one.
"""

from __future__ import annotations

import hmac

from google.protobuf.message import DecodeError

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody

MIN_SECRET_BYTES = 16


def resident_counts(body: TicketBody) -> tuple[int, ...]:
    """Number of leading blocks that the issuer already has, by cache group; they are not sent.
    BatonError(INVALID) if a group has more resident blocks than blocks."""
    counts = tuple(body.resident_counts) or (0,) * len(body.block_counts)
    if len(counts) != len(body.block_counts) or any(map(int.__gt__, counts, body.block_counts)):
        raise BatonError(
            ErrorKind.INVALID,
            f"a ticket for {list(body.block_counts)} blocks claims {list(counts)} resident blocks",
        )
    return counts


class TicketSigner:
    """Signs and verifies tickets with HMAC-SHA256 under one incarnation's secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a ticket secret needs at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = bytes(secret)

    def sign(self, body: TicketBody) -> Ticket:
        """The ticket of this body; equal bodies give equal tickets."""
        serialised = body.SerializeToString(deterministic=True)
        return Ticket(body=serialised, signature=self._signature(serialised))

    def verify(self, ticket: Ticket) -> TicketBody:
        """The body of a ticket that this signer signed; BatonError(FORBIDDEN) for any other."""
        if not hmac.compare_digest(self._signature(ticket.body), ticket.signature):
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was not signed by this receiver")
        try:
            return TicketBody.FromString(ticket.body)
        except DecodeError as error:  # only if the secret leaked or is shared
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket's body cannot be parsed") from error

    def _signature(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, "sha256")
