"""The minimal front of `bench.decode` sends all that it has read, without waiting for the next reading."""

from __future__ import annotations

import socket

from baton.engine.shared_memory.output_ring import Finish, Record
from bench.decode.front import Outlet, consume


def word(slot: int, token: int, finish: Finish = Finish.NONE) -> Record:
    return Record(slot, 1, token, finish)


def test_a_sequence_that_begins_keeps_back_no_token_of_the_others() -> None:
    """The beginning's message has beginnings alone; the last reading of a run has no other message after
    it."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            outlet = Outlet(ours)
            outlet.send([word(0, token) for token in (1, 2, 3)], 1)
            outlet.send([word(0, 4, Finish.LENGTH), word(1, 5)], 2)
        with theirs.makefile("rb") as source:
            tokens, messages = consume(source)
    assert (tokens, messages) == (outlet.tokens, outlet.messages) == (5, 3)
