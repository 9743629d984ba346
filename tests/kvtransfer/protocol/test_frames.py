"""Frames: what is encoded is decoded, and nothing else is; random bytes never hurt a receiver."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.link.staging import Owner
from kvtransfer.protocol import frames
from kvtransfer.protocol.frames import (
    HEADER_BYTES,
    Commit,
    CommitAck,
    Credit,
    FrameError,
    Metadata,
    Piece,
    Refused,
    SenderControl,
    Stop,
    StopAck,
    StopReason,
    Withdraw,
    WithdrawReason,
    decode_from_receiver,
    decode_from_sender,
    encode,
    encode_piece_header,
)
from tests.kvtransfer.link.memory_links import Memory
from tests.kvtransfer.support.peers import Shape

u8 = st.integers(0, 255)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
pieces = st.builds(Piece, u64, u32, u32, u64, st.integers(1, 64), u32, u64)
last_words = st.one_of(
    st.builds(Metadata, u64, st.binary(max_size=200)),
    st.builds(Commit, u64, st.binary(max_size=200)),
    st.builds(Withdraw, u64, st.sampled_from([WithdrawReason.FINISHED, WithdrawReason.ABORTED])),
    st.builds(StopAck, u64),
)
answers = st.one_of(
    st.builds(Credit, st.lists(u32, min_size=1, max_size=40).map(tuple)),
    st.builds(Stop, u64, st.sampled_from(StopReason)),
    st.builds(CommitAck, u64, u64),
    st.builds(Refused, u64, st.sampled_from(ErrorKind), st.text(max_size=100)),
)
quick = settings(max_examples=150, deadline=None, derandomize=True)


@quick
@given(pieces, st.data())
def test_pieces_come_back(piece: Piece, data: st.DataObject) -> None:
    payload = data.draw(st.binary(min_size=piece.length, max_size=piece.length))
    frame, view = decode_from_sender(encode_piece_header(piece) + payload)
    assert (frame, bytes(view)) == (piece, payload)


@quick
@given(last_words)
def test_the_senders_frames_come_back(frame: SenderControl) -> None:
    assert decode_from_sender(encode(frame))[0] == frame
    with pytest.raises(FrameError):
        decode_from_receiver(encode(frame))


@quick
@given(answers)
def test_the_receivers_frames_come_back(frame: frames.ReceiverFrame) -> None:
    assert decode_from_receiver(encode(frame)) == frame
    with pytest.raises(FrameError):
        decode_from_sender(encode(frame))


@quick
@given(st.one_of(last_words, answers), st.data())
def test_a_cut_or_longer_message_is_refused(
    frame: SenderControl | frames.ReceiverFrame, data: st.DataObject
) -> None:
    whole = encode(frame)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for wrong in (cut, whole + b"x"):
        for decode in (decode_from_sender, decode_from_receiver):
            with pytest.raises(FrameError):
                decode(wrong)


def refused_by_both(message: bytes) -> None:
    for decode in (decode_from_sender, decode_from_receiver):
        with pytest.raises(FrameError):
            decode(message)


@quick
@given(st.one_of(last_words, answers), st.integers(0), st.integers(1, 255))
def test_a_changed_byte_is_refused(frame: SenderControl | frames.ReceiverFrame, at: int, flip: int) -> None:
    """Wherever it is: in the header, or in a record, a reason, a list of credits."""
    changed = bytearray(encode(frame))
    changed[at % len(changed)] ^= flip
    refused_by_both(bytes(changed))


def test_every_single_bit_of_a_commit_counts() -> None:
    whole = encode(Commit(77, b"the token ids of a prompt"))
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        refused_by_both(bytes(changed))


@quick
@given(pieces, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_pieces_changed_header_is_refused_or_means_something_else(piece: Piece, at: int, flip: int) -> None:
    """Accepted headers encode back to the same bytes: no field is ignored. The receiver judges the piece's
    checksum."""
    changed = bytearray(encode_piece_header(piece) + bytes(piece.length))
    changed[at] ^= flip
    try:
        found, payload = decode_from_sender(bytes(changed))
    except FrameError:
        return
    assert isinstance(found, Piece)
    assert encode_piece_header(found) + payload == bytes(changed)


def test_limits() -> None:
    for wrong in (
        encode(Commit(1, b"x" * (frames.MAX_COMMIT_BYTES + 1))),
        encode(Metadata(1, b"x" * (frames.MAX_COMMIT_BYTES + 1))),
        encode(Withdraw(1, WithdrawReason.LINK_LOST)),
        encode_piece_header(Piece(1, 0, 0, 0, 0, 0, 0)),
    ):
        with pytest.raises(FrameError):
            decode_from_sender(wrong)
    long = decode_from_receiver(encode(Refused(1, ErrorKind.INTERNAL, "é" * 5000)))
    assert isinstance(long, Refused)
    assert len(long.text) <= frames.MAX_REASON_BYTES
    with pytest.raises(FrameError):
        decode_from_receiver(encode(Credit(())))


small = st.integers(0, 3)
near_pieces = st.builds(
    Piece, small, small, small, st.sampled_from([0, 16, 5]), st.integers(1, 40), st.integers(0, 5), u64
)
messages = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda piece, fill: encode_piece_header(piece) + bytes([fill]) * piece.length, near_pieces, u8),
    st.builds(Commit, small, st.binary(max_size=60)).map(encode),
    last_words.map(encode),
    st.builds(Withdraw, small, st.just(WithdrawReason.ABORTED)).map(encode),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(messages, min_size=1, max_size=30))
def test_no_bytes_hurt_the_receiver(sent: list[bytes]) -> None:
    """A rogue sender may lose its link; the receiver goes on, and each staging index has one owner."""
    memory = _fuzzed()
    peers = memory.peers
    pipe = memory.transport.pipes[0]
    pipe.to_receiver.extend(sent)
    for _ in range(3 * len(sent) + 3):
        peers.received += peers.receiver.poll(4)
        if pipe.error is None:  # the link is open
            owned = [pipe.staging.count(owner) for owner in Owner]
            assert sum(owned) == pipe.staging.pieces
            assert owned[Owner.QUARANTINED] == 0
    if pipe.error is None:
        assert pipe.staging.count(Owner.RECEIVER) == 0
    assert not peers.sink.scattered  # no fuzzed checksum is right
    pipe.break_off(BatonError(ErrorKind.UNAVAILABLE, "over"))
    peers.receiver.poll(4)
    assert peers.receiver.links == []
    peers.close()


def _fuzzed() -> Memory:
    memory = Memory(Shape(block_bytes=(32, 20), piece_bytes=16, window_pieces=4))
    peers = memory.peers
    for transfer in range(3):
        peers.expect(transfer, [[0, 1, 2], [1]])
    peers.begin(9, [0, 0])
    peers.run_until(lambda: peers.sender.counters.links_opened == 1)
    return memory
