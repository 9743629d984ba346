from __future__ import annotations

import hashlib
import hmac

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.types_pb2 import Attempt
from kvtransfer.protocol.ticket import MIN_SECRET_BYTES, TicketSigner, resident_counts

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
    with pytest.raises(BatonError, match=r"^the ticket was not signed by this receiver$"):
        TicketSigner(b"l" * 32).verify(ticket)


def test_empty_and_unreadable_tickets_are_refused() -> None:
    signer = TicketSigner(b"k" * 32)
    with pytest.raises(BatonError):
        signer.verify(Ticket())
    body = b"\xff\xff\xff"
    with pytest.raises(BatonError, match=r"^the ticket's body cannot be parsed$") as refused:
        signer.verify(Ticket(body=body, signature=hmac.digest(b"k" * 32, body, hashlib.sha256)))
    assert refused.value.kind is ErrorKind.FORBIDDEN


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(
        ValueError, match=rf"^a ticket secret needs at least {MIN_SECRET_BYTES} bytes, not 15$"
    ):
        TicketSigner(b"k" * (MIN_SECRET_BYTES - 1))
    TicketSigner(b"k" * MIN_SECRET_BYTES)


def test_the_signature_is_hmac_sha256_of_the_deterministic_body() -> None:
    ticket = TicketSigner(b"k" * 32).sign(BODY)
    assert ticket.body == BODY.SerializeToString(deterministic=True)
    assert ticket.signature == hmac.digest(b"k" * 32, ticket.body, hashlib.sha256)


@pytest.mark.parametrize(("blocks", "held"), [([3, 1], [3, 1]), ([3, 1], [0, 1]), ([3, 1], []), ([], [])])
def test_resident_counts_have_one_count_a_cache_group(blocks: list[int], held: list[int]) -> None:
    counts = resident_counts(TicketBody(block_counts=blocks, resident_counts=held))
    assert counts == tuple(held or [0] * len(blocks))


@pytest.mark.parametrize("held", [[4, 1], [3, 2], [3], [3, 1, 0]])
def test_more_resident_blocks_than_blocks_are_refused(held: list[int]) -> None:
    with pytest.raises(BatonError) as refused:
        resident_counts(TicketBody(block_counts=[3, 1], resident_counts=held))
    assert refused.value.kind is ErrorKind.INVALID
    assert str(refused.value) == f"a ticket for [3, 1] blocks claims {held} resident blocks"
