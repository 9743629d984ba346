from __future__ import annotations

import pytest

from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.types_pb2 import Attempt
from kvtransfer.ticket import TicketSigner

BODY = TicketBody(attempt=Attempt(request_id=b"r" * 16, number=2), transfer_id=77, block_counts=[3, 1])


def test_a_signed_ticket_verifies_to_its_body() -> None:
    signer = TicketSigner(b"k" * 32)
    assert signer.verify(signer.sign(BODY)) == BODY


def test_any_flipped_bit_is_refused() -> None:
    signer = TicketSigner(b"k" * 32)
    ticket = signer.sign(BODY)
    for field in ("body", "signature"):
        whole = getattr(ticket, field)
        for place in range(len(whole)):
            forged = Ticket(body=ticket.body, signature=ticket.signature)
            setattr(forged, field, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(BatonError) as refused:
                signer.verify(forged)
            assert refused.value.kind is ErrorKind.FORBIDDEN


def test_another_incarnations_ticket_is_refused() -> None:
    ticket = TicketSigner(b"k" * 32).sign(BODY)
    with pytest.raises(BatonError, match="not signed"):
        TicketSigner(b"l" * 32).verify(ticket)


def test_empty_and_unreadable_tickets_are_refused() -> None:
    signer = TicketSigner(b"k" * 32)
    with pytest.raises(BatonError):
        signer.verify(Ticket())
    body = b"\xff\xff\xff"
    with pytest.raises(BatonError, match="cannot be read"):
        signer.verify(Ticket(body=body, signature=signer._signature(body)))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError):
        TicketSigner(b"short")
