"""Comparison of the two ends of a link before any byte moves: identity, layout and protocol version."""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest
from baton.v1.types_pb2 import WorkerIdentity

# The version of frames.py and of tickets. In 5 pieces could precede the ticket; in 3 there was no early
# metadata; in 2 every block was sent, resident or not; in 1 only pieces had checksums.
PROTOCOL_MIN = 6
PROTOCOL_MAX = 6
INCARNATION_BYTES = 16


def link_request(
    sender: WorkerIdentity,
    receiver_incarnation: bytes,
    fingerprint: bytes,
    link_number: int,
    *,
    keep_earlier: bool = False,
) -> OpenLinkRequest:
    """A sender's request for a link. `link_number`: how many links it has requested so far. `keep_earlier`:
    its earlier link to this receiver stays open until its transfers have ended."""
    return OpenLinkRequest(
        sender=sender,
        receiver_incarnation=receiver_incarnation,
        fingerprint=fingerprint,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        link_number=link_number,
        keep_earlier=keep_earlier,
    )


def same_worker(one: WorkerIdentity, other: WorkerIdentity) -> bool:
    """True if both are incarnations of one worker of one cluster."""
    return (one.cluster_id, one.name, one.rank) == (other.cluster_id, other.name, other.rank)


def is_newer(request: OpenLinkRequest, peer: WorkerIdentity, link_number: int) -> bool:
    """True if a request is newer than an existing link of the same worker: of a later incarnation, or of the
    same one with a higher link number. If the wall clock was set back, a later incarnation looks older: its
    link is granted once the earlier one's is found broken, seconds after that process ended."""
    if request.sender.incarnation == peer.incarnation:
        return request.link_number >= link_number
    return request.sender.started_ns > peer.started_ns


def agree(request: OpenLinkRequest, receiver: WorkerIdentity, fingerprint: bytes) -> int:
    """The protocol version for this link; a BatonError that names the difference where the ends do not
    match."""
    sender = request.sender
    if not sender.name or len(sender.incarnation) != INCARNATION_BYTES:
        raise BatonError(ErrorKind.INVALID, "a sender needs a name and an incarnation of 16 bytes")
    if request.receiver_incarnation != receiver.incarnation:
        # The sender's ticket is of an earlier incarnation of this receiver: a retry will have a current one.
        raise BatonError(
            ErrorKind.UNAVAILABLE,
            f"incarnation differs: sender {sender.name!r} looks for {receiver.name!r} "
            f"{request.receiver_incarnation.hex()}, this is {receiver.incarnation.hex()}",
        )
    protocol = min(request.protocol_max, PROTOCOL_MAX)
    if protocol < max(request.protocol_min, PROTOCOL_MIN):
        raise BatonError(
            ErrorKind.CONFLICT,
            f"protocol differs: sender {sender.name!r} supports {request.protocol_min} to "
            f"{request.protocol_max}, receiver {receiver.name!r} {PROTOCOL_MIN} to {PROTOCOL_MAX}",
        )
    if (sender.rank, sender.rank_count) != (receiver.rank, receiver.rank_count):
        raise BatonError(
            ErrorKind.CONFLICT,
            f"rank differs: sender {sender.name!r} is {sender.rank} of {sender.rank_count}, "
            f"receiver {receiver.name!r} {receiver.rank} of {receiver.rank_count}",
        )
    if request.fingerprint != fingerprint:
        raise BatonError(
            ErrorKind.CONFLICT,
            f"layout fingerprint differs: sender {sender.name!r} has {request.fingerprint.hex() or 'none'}, "
            f"receiver {receiver.name!r} {fingerprint.hex()}",
        )
    return protocol
