"""What travels on a link's stream: frames of a fixed little-endian header and a payload.

    sender -> receiver                              receiver -> sender
      PIECE     bytes of a block, into staging        CREDIT     staging indices, free again
      RECORD    what is known of it at the beginning  STOP       send no more of this transfer
      COMMIT    the CommitRecord, or what RECORD left
                out; behind all pieces
      WITHDRAW  nothing more comes; not committed     COMMITTED  the commit is accepted
      QUIET     answers STOP: nothing more comes      REFUSED    it is not; kind and text say why

    header, 48 bytes:  magic u16 | kind u8 | reason u8 | group u32 | transfer u64 | ordinal u32 |
                       staging u32 | offset u64 | length u32 | zero u32 | checksum u64

`length` is the payload's. COMMITTED has a time in place of `offset`. A field that a kind does not use is
zero. A piece's checksum is `checksum.py`'s, over its bytes and place, and the receiver verifies it in
staging; that of every other frame is a digest of the whole message, verified here: a bit that flips in a
commit's token ids, or in the transfer an answer names, ends the link. Decoding checks every field and raises
`FrameError`; it never trusts a length and never reads past the message.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from baton.errors import BatonError, ErrorKind

_HEADER = struct.Struct("<HBBIQIIQIIQ")
HEADER_BYTES = _HEADER.size
_CHECKSUM_BYTES = 8  # the header's last field
_KIND_AT = 2
_MAGIC = 0xBA70

# Enough for the token ids of a context of two million tokens.
MAX_COMMIT_BYTES = 8 << 20
MAX_REASON_BYTES = 4096


class FrameError(BatonError):
    """A message that is no valid frame. Fails the link, never the process."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INVALID, f"malformed frame: {message}")


class Kind(IntEnum):
    PIECE = 1
    COMMIT = 2
    WITHDRAW = 3
    QUIET = 4
    CREDIT = 5
    STOP = 6
    COMMITTED = 7
    REFUSED = 8
    RECORD = 10  # 9 was another's


_KINDS = frozenset(Kind)


class WithdrawReason(IntEnum):
    """Why a transfer ended without a commit. The first two are the sender's and travel."""

    FINISHED = 1  # nothing is left to do for the receiver
    ABORTED = 2
    LINK_LOST = 3
    CORRUPTED = 4  # a piece failed its checksum
    REFUSED = 5  # the commit or a piece contradicted what was expected


class StopReason(IntEnum):
    FORGOTTEN = 1  # the receiver does not know this transfer, or no longer
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
class Record:
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
class Quiet:
    transfer: int


@dataclass(frozen=True, slots=True)
class Credit:
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    transfer: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Committed:
    """`at_ns`: when, by the receiver's monotonic clock, which is the sender's too on one host."""

    transfer: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Refused:
    transfer: int
    kind: ErrorKind
    text: str


Words = Record | Commit | Withdraw | Quiet
"""What a sender says beside pieces."""
SenderFrame = Piece | Words
ReceiverFrame = Credit | Stop | Committed | Refused


def encode_piece_header(piece: Piece) -> bytes:
    """The header that goes before the piece's bytes."""
    return _HEADER.pack(
        _MAGIC, Kind.PIECE, 0, piece.group, piece.transfer, piece.ordinal, piece.staging,
        piece.offset, piece.length, 0, piece.checksum,
    )  # fmt: skip


def encode(frame: Words | ReceiverFrame) -> bytes:
    """The whole message of a frame other than a piece."""
    match frame:
        case Record(transfer, record):
            return _message(Kind.RECORD, transfer, payload=record)
        case Commit(transfer, record):
            return _message(Kind.COMMIT, transfer, payload=record)
        case Withdraw(transfer, reason):
            return _message(Kind.WITHDRAW, transfer, reason)
        case Quiet(transfer):
            return _message(Kind.QUIET, transfer)
        case Credit(indices):
            return _message(Kind.CREDIT, payload=struct.pack(f"<{len(indices)}I", *indices))
        case Stop(transfer, why):
            return _message(Kind.STOP, transfer, why)
        case Committed(transfer, at_ns):
            return _message(Kind.COMMITTED, transfer, at_ns=at_ns)
        case Refused(transfer, kind, text):
            payload = text.encode()[:MAX_REASON_BYTES]
            return _message(Kind.REFUSED, transfer, kind.value, payload)


def decode_from_sender(message: bytes) -> tuple[SenderFrame, memoryview]:
    """A frame on its way to the receiver, with its payload (a piece's bytes)."""
    kind, reason, frame, payload = _split(message)
    if kind is Kind.PIECE:
        _expect(reason == 0, "a piece has a reason")
        _expect(frame.length > 0, "a piece without bytes")
        return frame, payload
    _expect_bare(frame)
    if kind is Kind.WITHDRAW:
        sent = {WithdrawReason.FINISHED.value, WithdrawReason.ABORTED.value}
        _expect(reason in sent, f"withdraw reason {reason}")
        _expect(not payload, "a withdraw with a payload")
        return Withdraw(frame.transfer, WithdrawReason(reason)), payload
    _expect(reason == 0, f"{kind.name} has a reason")
    if kind in (Kind.RECORD, Kind.COMMIT):
        _expect(len(payload) <= MAX_COMMIT_BYTES, f"a commit record of {len(payload)} bytes")
        what = Record if kind is Kind.RECORD else Commit
        return what(frame.transfer, bytes(payload)), payload
    _expect(kind is Kind.QUIET, f"{kind.name} does not come from a sender")
    _expect(not payload, "a quiet with a payload")
    return Quiet(frame.transfer), payload


def decode_announced(message: bytes) -> list[SenderFrame]:
    """`decode_from_sender` where pieces' bytes went another way: each is announced by its header alone,
    several in one message."""
    if len(message) < HEADER_BYTES or len(message) % HEADER_BYTES or message[_KIND_AT] != Kind.PIECE:
        return [decode_from_sender(message)[0]]
    pieces: list[SenderFrame] = []
    for (
        magic,
        kind,
        reason,
        group,
        transfer,
        ordinal,
        staging,
        offset,
        length,
        zero,
        checksum,
    ) in _HEADER.iter_unpack(message):
        whole = magic == _MAGIC and kind == Kind.PIECE and reason == 0 and zero == 0
        _expect(whole, "a piece's header with other fields")
        _expect(length > 0, "a piece without bytes")
        pieces.append(Piece(transfer, group, ordinal, offset, length, staging, checksum))
    return pieces


def decode_from_receiver(message: bytes) -> ReceiverFrame:
    """A frame on its way to the sender."""
    kind, reason, frame, payload = _split(message)
    _expect_bare(frame, timed=kind is Kind.COMMITTED)
    if kind is Kind.REFUSED:
        _expect(reason in {known.value for known in ErrorKind}, f"error kind {reason}")
        _expect(len(payload) <= MAX_REASON_BYTES, f"a reason of {len(payload)} bytes")
        return Refused(frame.transfer, ErrorKind(reason), bytes(payload).decode(errors="replace"))
    if kind is Kind.STOP:
        _expect(reason in {known.value for known in StopReason}, f"stop reason {reason}")
        _expect(not payload, "a stop with a payload")
        return Stop(frame.transfer, StopReason(reason))
    _expect(reason == 0, f"{kind.name} has a reason")
    if kind is Kind.CREDIT:
        _expect(frame.transfer == 0, "a credit names a transfer")
        _expect(len(payload) % 4 == 0 and len(payload) > 0, f"a credit of {len(payload)} bytes")
        return Credit(struct.unpack(f"<{len(payload) // 4}I", payload))
    _expect(kind is Kind.COMMITTED, f"{kind.name} does not come from a receiver")
    _expect(not payload, "a committed with a payload")
    return Committed(frame.transfer, frame.offset)


def _message(
    kind: Kind, transfer: int = 0, reason: int = 0, payload: bytes = b"", *, at_ns: int = 0
) -> bytes:
    header = _HEADER.pack(_MAGIC, kind, reason, 0, transfer, 0, 0, at_ns, len(payload), 0, 0)
    return header[:-_CHECKSUM_BYTES] + _digest(header, payload) + payload


def _digest(header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    """Of a frame that is no piece: over all but the checksum's own place."""
    digest = hashlib.blake2b(header[:-_CHECKSUM_BYTES], digest_size=_CHECKSUM_BYTES)
    digest.update(payload)
    return digest.digest()


def _split(message: bytes) -> tuple[Kind, int, Piece, memoryview]:
    """Kind, reason, the fields as if of a piece, payload."""
    _expect(len(message) >= HEADER_BYTES, f"{len(message)} bytes are shorter than a header")
    magic, kind, reason, group, transfer, ordinal, staging, offset, length, zero, checksum = (
        _HEADER.unpack_from(message)
    )
    _expect(magic == _MAGIC, f"magic {magic:#06x}")
    _expect(zero == 0, "reserved field in use")
    _expect(kind in _KINDS, f"kind {kind}")
    payload = memoryview(message)[HEADER_BYTES:]
    _expect(len(payload) == length, f"{len(payload)} bytes of payload, {length} announced")
    header = memoryview(message)[:HEADER_BYTES]
    whole = kind == Kind.PIECE or header[-_CHECKSUM_BYTES:] == _digest(header, payload)
    _expect(whole, "its checksum differs")
    return Kind(kind), reason, Piece(transfer, group, ordinal, offset, length, staging, checksum), payload


def _expect_bare(frame: Piece, *, timed: bool = False) -> None:
    """`timed`: but for a time, where a piece has its offset."""
    unused: Iterable[int] = (frame.group, frame.ordinal, 0 if timed else frame.offset, frame.staging)
    _expect(not any(unused), "an unused field is not zero")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FrameError(otherwise)
