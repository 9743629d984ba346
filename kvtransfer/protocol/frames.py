"""Frames of a link: a fixed little-endian header and a payload.

    sender -> receiver                                 receiver -> sender
      PIECE     bytes of a block, into staging           CREDIT      staging indices, free again
      METADATA  the ticket, and early metadata           STOP        send no more of this transfer
      COMMIT    the CommitRecord, or what METADATA left
                out; follows all pieces
      WITHDRAW  nothing more follows; not committed      COMMIT_ACK  the commit is accepted
      STOP_ACK  answers STOP: nothing more follows       REFUSED     the transfer is refused: kind and text

    header, 48 bytes:  magic u16 | kind u8 | reason u8 | group u32 | transfer u64 | ordinal u32 |
                       staging u32 | offset u64 | length u32 | zero u32 | checksum u64

`length` is the payload's. COMMIT_ACK has a time in place of `offset`. Fields that a kind does not use are
zero.
A piece's checksum is that of `checksum.py`, over its bytes and place, and the receiver verifies it in
staging; that of every other frame is a digest of the whole message, verified here: a flipped bit in a
commit's token ids, or in the transfer id of an answer, breaks the link. Decoding checks every field and
raises `FrameError`; it trusts no length and never reads past the message.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from baton.base.errors import BatonError, ErrorKind

_HEADER = struct.Struct("<HBBIQIIQIIQ")
HEADER_BYTES = _HEADER.size
_CHECKSUM_BYTES = 8  # the header's last field
_KIND_AT = 2
_MAGIC = 0xBA70

# Enough for the token ids of a context of two million tokens.
MAX_COMMIT_BYTES = 8 << 20
MAX_REASON_BYTES = 4096


class FrameError(BatonError):
    """A message that is not a valid frame. Breaks the link, never the process."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INVALID, f"malformed frame: {message}")


class Kind(IntEnum):
    PIECE = 1
    COMMIT = 2
    WITHDRAW = 3
    STOP_ACK = 4
    CREDIT = 5
    STOP = 6
    COMMIT_ACK = 7
    REFUSED = 8
    METADATA = 10  # 9 was used by an earlier version


_KINDS = frozenset(Kind)


class WithdrawReason(IntEnum):
    """The reason why a transfer ended without a commit. The first two are sent by the sender."""

    FINISHED = 1  # there is nothing for the receiver to do
    ABORTED = 2
    LINK_LOST = 3
    CORRUPTED = 4  # a piece failed its checksum
    REFUSED = 5  # the commit or a piece contradicted what was expected


class StopReason(IntEnum):
    UNKNOWN = 1  # the receiver does not expect this transfer, or no longer
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes at `offset` of the `ordinal`-th block of `group`, in staging index `staging`."""

    transfer: int
    group: int
    ordinal: int
    offset: int
    length: int
    staging: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """The ticket, and with it all of the record that is known before prefill ends."""

    transfer: int
    record: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    transfer: int
    record: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    transfer: int
    reason: WithdrawReason


@dataclass(frozen=True, slots=True)
class StopAck:
    transfer: int


@dataclass(frozen=True, slots=True)
class Credit:
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    transfer: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class CommitAck:
    """Accepts a commit. `at_ns`: when the commit was accepted, by the monotonic clock of the receiver's
    host."""

    transfer: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Refused:
    transfer: int
    kind: ErrorKind
    text: str


SenderControl = Metadata | Commit | Withdraw | StopAck
"""Frames of a sender other than pieces."""
SenderFrame = Piece | SenderControl
ReceiverFrame = Credit | Stop | CommitAck | Refused


def encode_piece_header(piece: Piece) -> bytes:
    """The header in front of the piece's bytes."""
    return _HEADER.pack(
        _MAGIC, Kind.PIECE, 0, piece.group, piece.transfer, piece.ordinal, piece.staging,
        piece.offset, piece.length, 0, piece.checksum,
    )  # fmt: skip


def encode(frame: SenderControl | ReceiverFrame) -> bytes:
    """The message of a frame other than a piece."""
    match frame:
        case Metadata(transfer, record):
            return _message(Kind.METADATA, transfer, payload=record)
        case Commit(transfer, record):
            return _message(Kind.COMMIT, transfer, payload=record)
        case Withdraw(transfer, reason):
            return _message(Kind.WITHDRAW, transfer, reason)
        case StopAck(transfer):
            return _message(Kind.STOP_ACK, transfer)
        case Credit(indices):
            return _message(Kind.CREDIT, payload=struct.pack(f"<{len(indices)}I", *indices))
        case Stop(transfer, why):
            return _message(Kind.STOP, transfer, why)
        case CommitAck(transfer, at_ns):
            return _message(Kind.COMMIT_ACK, transfer, at_ns=at_ns)
        case Refused(transfer, kind, text):
            payload = text.encode()[:MAX_REASON_BYTES]
            return _message(Kind.REFUSED, transfer, kind.value, payload)


def decode_from_sender(message: bytes) -> tuple[SenderFrame, memoryview]:
    """Decodes a frame of a sender; the frame and its payload (a piece's bytes)."""
    kind, reason, frame, payload = _split(message)
    if kind is Kind.PIECE:
        _require(reason == 0, "a piece has a reason")
        _require(frame.length > 0, "a piece without bytes")
        return frame, payload
    _require_unused(frame)
    if kind is Kind.WITHDRAW:
        sent = {WithdrawReason.FINISHED.value, WithdrawReason.ABORTED.value}
        _require(reason in sent, f"withdraw reason {reason}")
        _require(not payload, "a withdraw with a payload")
        return Withdraw(frame.transfer, WithdrawReason(reason)), payload
    _require(reason == 0, f"{kind.name} has a reason")
    if kind in (Kind.METADATA, Kind.COMMIT):
        _require(len(payload) <= MAX_COMMIT_BYTES, f"a commit record of {len(payload)} bytes")
        made = Metadata if kind is Kind.METADATA else Commit
        return made(frame.transfer, bytes(payload)), payload
    _require(kind is Kind.STOP_ACK, f"{kind.name} does not come from a sender")
    _require(not payload, "a stop acknowledgement with a payload")
    return StopAck(frame.transfer), payload


def decode_headers(message: bytes) -> list[SenderFrame]:
    """Decodes a message of a link whose pieces' bytes travel outside its frames: pieces are announced by
    their headers alone, several in one message."""
    if len(message) < HEADER_BYTES or len(message) % HEADER_BYTES or message[_KIND_AT] != Kind.PIECE:
        return [decode_from_sender(message)[0]]
    pieces: list[SenderFrame] = []
    for fields in _HEADER.iter_unpack(message):
        magic, kind, reason, group, transfer, ordinal, staging, offset, length, zero, checksum = fields
        whole = magic == _MAGIC and kind == Kind.PIECE and reason == 0 and zero == 0
        _require(whole, "a piece's header with other fields")
        _require(length > 0, "a piece without bytes")
        pieces.append(Piece(transfer, group, ordinal, offset, length, staging, checksum))
    return pieces


def decode_from_receiver(message: bytes) -> ReceiverFrame:
    """Decodes a frame of a receiver."""
    kind, reason, frame, payload = _split(message)
    _require_unused(frame, timed=kind is Kind.COMMIT_ACK)
    if kind is Kind.REFUSED:
        _require(reason in {known.value for known in ErrorKind}, f"error kind {reason}")
        _require(len(payload) <= MAX_REASON_BYTES, f"a reason of {len(payload)} bytes")
        return Refused(frame.transfer, ErrorKind(reason), bytes(payload).decode(errors="replace"))
    if kind is Kind.STOP:
        _require(reason in {known.value for known in StopReason}, f"stop reason {reason}")
        _require(not payload, "a stop with a payload")
        return Stop(frame.transfer, StopReason(reason))
    _require(reason == 0, f"{kind.name} has a reason")
    if kind is Kind.CREDIT:
        _require(frame.transfer == 0, "a credit names a transfer")
        _require(len(payload) % 4 == 0 and len(payload) > 0, f"a credit of {len(payload)} bytes")
        return Credit(struct.unpack(f"<{len(payload) // 4}I", payload))
    _require(kind is Kind.COMMIT_ACK, f"{kind.name} does not come from a receiver")
    _require(not payload, "a commit acknowledgement with a payload")
    return CommitAck(frame.transfer, frame.offset)


def _message(
    kind: Kind, transfer: int = 0, reason: int = 0, payload: bytes = b"", *, at_ns: int = 0
) -> bytes:
    header = _HEADER.pack(_MAGIC, kind, reason, 0, transfer, 0, 0, at_ns, len(payload), 0, 0)
    return header[:-_CHECKSUM_BYTES] + _digest(header, payload) + payload


def _digest(header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    """The checksum of a frame other than a piece: over all bytes but its own."""
    digest = hashlib.blake2b(header[:-_CHECKSUM_BYTES], digest_size=_CHECKSUM_BYTES)
    digest.update(payload)
    return digest.digest()


def _split(message: bytes) -> tuple[Kind, int, Piece, memoryview]:
    """Kind, reason, the fields as those of a piece, payload."""
    _require(len(message) >= HEADER_BYTES, f"{len(message)} bytes are shorter than a header")
    magic, kind, reason, group, transfer, ordinal, staging, offset, length, zero, checksum = (
        _HEADER.unpack_from(message)
    )
    _require(magic == _MAGIC, f"magic {magic:#06x}")
    _require(zero == 0, "the reserved field is not zero")
    _require(kind in _KINDS, f"kind {kind}")
    payload = memoryview(message)[HEADER_BYTES:]
    _require(len(payload) == length, f"{len(payload)} bytes of payload, {length} announced")
    header = memoryview(message)[:HEADER_BYTES]
    whole = kind == Kind.PIECE or header[-_CHECKSUM_BYTES:] == _digest(header, payload)
    _require(whole, "its checksum does not match")
    return Kind(kind), reason, Piece(transfer, group, ordinal, offset, length, staging, checksum), payload


def _require_unused(frame: Piece, *, timed: bool = False) -> None:
    """Requires that fields that only pieces use are zero. `timed`: except the offset, which holds a time."""
    unused: Iterable[int] = (frame.group, frame.ordinal, 0 if timed else frame.offset, frame.staging)
    _require(not any(unused), "an unused field is not zero")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FrameError(otherwise)
