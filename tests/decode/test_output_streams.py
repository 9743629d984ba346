"""Output streams: each router receives all output once, in order, and again after it reconnects."""

from __future__ import annotations

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.output_ring import Finish, Record
from baton.v1.decode_pb2 import Position, SubscribeResponse
from baton.v1.types_pb2 import Attempt, FinishReason
from services.decode import output_streams as streams_module
from services.decode.output_streams import (
    LINGER_S,
    MESSAGE_BYTES,
    TICKET_GRACE_S,
    OutputStreams,
    UnknownSequenceError,
)

ROUTER, OTHER = b"r" * 16, b"o" * 16
ATTEMPT = Attempt(request_id=b"q" * 16, number=1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def word(token: int, finish: Finish = Finish.NONE, slot: int = 3, generation: int = 9) -> Record:
    return Record(slot, generation, token, finish)


def outputs(message: SubscribeResponse | None) -> list[tuple[int, list[int], int]]:
    assert message is not None
    return [(o.first_number, list(o.token_ids), o.finish_reason) for o in message.outputs]


def drained(streams: OutputStreams) -> list[tuple[int, list[int], int]]:
    """All that the router is due, sorted."""
    found = []
    while (message := streams.collect(ROUTER, 2)) is not None:
        found += outputs(message)
    return sorted(found)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def streams(clock: Clock) -> OutputStreams:
    made = OutputStreams(clock)
    made.follow(ROUTER)
    made.reserve(ATTEMPT, ROUTER, first_number=4, slot=3, generation=9)
    return made


def test_a_message_has_all_output_since_the_last(streams: OutputStreams) -> None:
    assert streams.collect(ROUTER, 0) is None
    streams.emit(word(11))
    assert outputs(streams.collect(ROUTER, 1)) == [(4, [11], 0)]
    assert streams.collect(ROUTER, 1) is None
    streams.emit(word(12))
    streams.emit(word(13))
    assert streams.emit(word(14, Finish.LENGTH))
    assert outputs(streams.collect(ROUTER, 2)) == [(5, [12, 13, 14], FinishReason.FINISH_REASON_LENGTH)]
    assert streams.collect(ROUTER, 3) is None
    assert streams.live == 0


def test_logprobs_accompany_their_tokens_and_are_sent_again(streams: OutputStreams) -> None:
    streams.emit(word(11)._replace(logprobs=Logprobs(-0.25, ((11, -0.25),))))

    def reported(first: int) -> list[tuple[float, list[tuple[int, float]]]]:
        message = streams.collect(ROUTER, 2)
        assert message is not None
        (output,) = message.outputs
        assert output.first_number == first
        assert len(output.logprobs) == len(output.token_ids)
        return [(one.logprob, [(t.token_id, t.logprob) for t in one.top]) for one in output.logprobs]

    first, *later = [(-0.25, [(11, -0.25)]), (-0.5, [(12, -0.5), (3, -1.25)]), (-2.0, [])]
    assert reported(4) == [first]
    streams.emit(word(12)._replace(logprobs=Logprobs(-0.5, ((12, -0.5), (3, -1.25)))))
    streams.emit(word(13, Finish.LENGTH)._replace(logprobs=Logprobs(-2.0)))
    assert reported(5) == later
    streams.follow(ROUTER)
    assert reported(4) == [first, *later]


def test_a_cancel_carries_no_token(streams: OutputStreams) -> None:
    streams.emit(word(11))
    streams.emit(word(0, Finish.CANCELLED))
    assert outputs(streams.collect(ROUTER, 1)) == [(4, [11], FinishReason.FINISH_REASON_CANCELLED)]


def test_a_router_that_reconnects_receives_output_again(streams: OutputStreams, clock: Clock) -> None:
    streams.emit(word(11))
    first, _ = streams.follow(ROUTER)
    streams.collect(ROUTER, 1)
    streams.unfollow(ROUTER, first)
    streams.emit(word(12, Finish.STOP))
    clock.now += 1
    second, _ = streams.follow(ROUTER)
    assert outputs(streams.collect(ROUTER, 2)) == [(4, [11, 12], FinishReason.FINISH_REASON_STOP)]
    streams.unfollow(ROUTER, first)  # the old call ends late: the new one stays
    assert streams.is_current(ROUTER, second)
    clock.now += LINGER_S + 1
    assert streams.sweep() == []


def test_attach_moves_a_stream_from_a_number_on(streams: OutputStreams) -> None:
    for token in (11, 12, 13):
        streams.emit(word(token))
    streams.follow(OTHER)
    streams.attach(ATTEMPT, OTHER, next_number=6)
    assert streams.collect(ROUTER, 1) is None
    assert outputs(streams.collect(OTHER, 1)) == [(6, [13], 0)]
    for wrong in (3, 8):
        with pytest.raises(BatonError) as refused:
            streams.attach(ATTEMPT, OTHER, next_number=wrong)
        assert refused.value.kind is ErrorKind.INVALID
    with pytest.raises(BatonError) as unknown:
        streams.attach(Attempt(request_id=b"x" * 16, number=1), OTHER, next_number=0)
    assert unknown.value.kind is ErrorKind.NOT_FOUND


def test_reservations_of_a_lost_router_end_before_its_sequences(streams: OutputStreams, clock: Clock) -> None:
    active = Attempt(request_id=b"a" * 16, number=1)
    streams.reserve(active, ROUTER, first_number=0, slot=4, generation=1)
    streams.emit(word(1, slot=4, generation=1))
    streams.unfollow(ROUTER, streams.follow(ROUTER)[0])
    clock.now += TICKET_GRACE_S - 0.1
    assert streams.sweep() == []
    clock.now += 0.2
    assert streams.sweep() == [ATTEMPT]
    streams.end_unused(ATTEMPT)
    assert streams.sweep() == []
    clock.now += LINGER_S - TICKET_GRACE_S
    assert streams.sweep() == [active]


def test_ended_streams_are_dropped_later(streams: OutputStreams, clock: Clock) -> None:
    streams.emit(word(1, Finish.STOP))
    assert streams.collect(ROUTER, 1) is not None
    clock.now += LINGER_S + 0.1
    streams.sweep()
    with pytest.raises(BatonError):
        streams.attach(ATTEMPT, OTHER, next_number=4)


def test_a_record_of_an_unknown_slot_is_an_error(streams: OutputStreams) -> None:
    with pytest.raises(UnknownSequenceError):
        streams.emit(word(1, generation=8))


def test_an_attempt_that_is_reserved_again_is_known_by_its_new_slot(streams: OutputStreams) -> None:
    streams.emit(word(11, Finish.CANCELLED))
    streams.reserve(ATTEMPT, ROUTER, first_number=4, slot=2, generation=5)
    streams.emit(word(21, slot=2, generation=5))
    assert drained(streams) == [(4, [21], 0)]
    assert streams.live == 1


def test_a_router_continues_each_sequence_at_its_position(streams: OutputStreams) -> None:
    other, gone = (Attempt(request_id=name * 16, number=1) for name in (b"a", b"g"))
    streams.reserve(other, ROUTER, first_number=0, slot=4, generation=1)
    for token in (11, 12, 13):
        streams.emit(word(token))
        streams.emit(word(token, slot=4, generation=1))
    streams.collect(ROUTER, 1)
    positions = [Position(attempt=ATTEMPT, next_number=6), Position(attempt=gone, next_number=9)]
    _, unknown = streams.follow(ROUTER, positions)
    assert unknown == [gone]
    # A sequence without a position is sent from its first number on.
    assert drained(streams) == [(0, [11, 12, 13], 0), (6, [13], 0)]
    # Prefill has sent it a token that decode has not emitted yet, or its position is before this attempt.
    for next_number, first, tokens in ((8, None, None), (7, None, None), (2, 4, [11, 12, 13])):
        streams.follow(ROUTER, [Position(attempt=ATTEMPT, next_number=next_number), positions[1]])
        reported = [one for one in drained(streams) if one[0] >= 4]
        assert reported == ([] if first is None else [(first, tokens, 0)])


def test_messages_are_bounded_and_lose_nothing(
    streams: OutputStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are checked with and without logprobs; the finish reason is sent with the last token."""
    monkeypatch.setattr(streams_module, "MESSAGE_BYTES", 4000)
    plain, rich = (Attempt(request_id=name * 16, number=1) for name in (b"p", b"r"))
    streams.reserve(plain, ROUTER, first_number=0, slot=4, generation=1)
    streams.reserve(rich, ROUTER, first_number=0, slot=5, generation=1)
    top = tuple((number, -1.5) for number in range(20))
    for token in range(3000):
        finish = Finish.LENGTH if token == 2999 else Finish.NONE
        streams.emit(word(token, finish, slot=4, generation=1))
        if token < 100:
            finish = Finish.STOP if token == 99 else Finish.NONE
            streams.emit(Record(5, 1, token, finish, Logprobs(-0.5, top)))
    got: dict[bytes, list[int]] = {}
    finishes: dict[bytes, int] = {}
    while (message := streams.collect(ROUTER, 1)) is not None:
        assert message.ByteSize() <= 4000 + 300
        for one in message.outputs:
            tokens = got.setdefault(one.attempt.request_id, [])
            assert one.first_number == len(tokens)
            assert len(one.logprobs) in (0, len(one.token_ids))
            assert one.attempt.request_id not in finishes, "something behind the end"
            tokens += one.token_ids
            if one.finish_reason:
                finishes[one.attempt.request_id] = one.finish_reason
    assert got == {plain.request_id: list(range(3000)), rich.request_id: list(range(100))}
    assert finishes == {plain.request_id: 2, rich.request_id: 1}
    assert MESSAGE_BYTES < 32 << 20


def test_sequences_that_begin_come_first_and_hold_up_no_others(streams: OutputStreams) -> None:
    """A sequence's first two words, prefill's token and its own first one, go before what others have; others
    wait for one such message at most, however many sequences begin."""
    old = [ATTEMPT, *(Attempt(request_id=bytes([n]) * 16, number=1) for n in range(1, 4))]
    for slot, attempt in enumerate(old[1:], 4):
        streams.reserve(attempt, ROUTER, first_number=0, slot=slot, generation=9)
    for token in (11, 12):
        for slot in range(3, 7):
            streams.emit(word(token, slot=slot))
    while streams.collect(ROUTER, 1) is not None:
        pass
    sent = []
    for step in range(3):
        new = Attempt(request_id=bytes([100 + step]) * 16, number=1)
        streams.reserve(new, ROUTER, first_number=0, slot=10 + step, generation=9)
        for slot in range(3, 7):
            streams.emit(word(20 + step, slot=slot))
        streams.emit(word(1, slot=10 + step))
        message = streams.collect(ROUTER, step)
        assert message is not None
        sent.append([one.attempt.request_id[0] for one in message.outputs])
    names = [attempt.request_id[0] for attempt in old]
    assert sent == [[100], [101, *names], [102]]
    assert sorted(outputs(streams.collect(ROUTER, 3))) == [(4, [22], 0)] * 3 + [(8, [22], 0)]
    streams.emit(word(2, slot=12))
    streams.emit(word(23))
    assert outputs(streams.collect(ROUTER, 4)) == [(1, [2], 0)]
    assert outputs(streams.collect(ROUTER, 4)) == [(9, [23], 0)]
    assert streams.collect(ROUTER, 4) is None


def test_sequences_of_a_discarded_router_id_are_cancelled(streams: OutputStreams, clock: Clock) -> None:
    """The cancel is immediate although the discarded id's stream may still be open: its connection is
    half-open."""
    first, _ = streams.follow(ROUTER)
    streams.emit(word(11))
    clock.now += 0.1
    streams.follow(OTHER, former=[ROUTER, b"u" * 16])
    assert not streams.is_current(ROUTER, first)
    assert streams.sweep() == [ATTEMPT]
    streams.emit(word(0, Finish.CANCELLED))
    assert streams.sweep() == []
    assert streams.live == 0
