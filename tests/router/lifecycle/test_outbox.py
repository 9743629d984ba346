"""Output that waits for its client is taken in deltas of bounded size."""

from __future__ import annotations

import asyncio

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.router_pb2 import RequestTrace, Usage
from services.router.lifecycle.outbox import MOST_TAKEN, Outbox, UnreadBudget
from services.router.request.request import Delta, Finish


def taken(outbox: Outbox) -> list[Delta]:
    parts = []
    while (part := outbox.take()) is not None:
        parts.append(part)
    return parts


@pytest.mark.parametrize("logprobs", [True, False])
def test_what_is_left_counts_as_unread(logprobs: bool) -> None:
    unread = UnreadBudget(10**6)
    outboxes = [Outbox(asyncio.Event(), unread, offsets=True) for _ in range(2)]
    for number in range(2 * MOST_TAKEN):
        for outbox in outboxes[number < MOST_TAKEN :]:
            outbox.put(7, "text", 7, b"seven" if logprobs else None)
    first, second = outboxes
    second.take()
    assert first.unread_bytes == second.unread_bytes == unread.total_bytes / 2


@pytest.mark.parametrize("count", [0, 1, MOST_TAKEN, MOST_TAKEN + 1, 4 * MOST_TAKEN, 5 * MOST_TAKEN - 1])
@pytest.mark.parametrize("logprobs", [True, False])
def test_everything_is_taken_in_order(count: int, logprobs: bool) -> None:
    unread = UnreadBudget(10**6)
    outbox = Outbox(asyncio.Event(), unread, offsets=True)
    outbox.put_prompt([b"p"])
    for number in range(count):
        outbox.put(number, f"{number},", number, b"l%d" % number if logprobs else None)
    outbox.end("end", Finish.STOP, Usage(completion_tokens=count), RequestTrace())
    whole, parts = unread.total_bytes, taken(outbox)
    assert whole >= 40 * count
    assert [len(part.token_ids) for part in parts[:-1]] == [MOST_TAKEN] * (len(parts) - 1)
    assert [token for part in parts for token in part.token_ids] == list(range(count))
    assert [place for part in parts for place in part.offsets] == list(range(count))
    assert "".join(part.text for part in parts) == "".join(f"{number}," for number in range(count)) + "end"
    assert [one for part in parts for one in part.logprobs] == [
        b"l%d" % number for number in range(count)
    ] * logprobs
    for number, part in enumerate(parts):
        assert part.first_number == number * MOST_TAKEN
        assert part.opening == (number == 0)
        assert part.prompt_logprobs == ([] if number else [b"p"])
        last = number == len(parts) - 1
        assert (part.finish is Finish.STOP, part.usage is not None, part.trace is not None) == (
            last,
            last,
            last,
        )
    assert unread.total_bytes == outbox.unread_bytes == 0


def test_an_error_comes_behind_all_tokens() -> None:
    outbox = Outbox(asyncio.Event(), UnreadBudget(10**6))
    for number in range(MOST_TAKEN + 1):
        outbox.put(number, "a")
    outbox.fail(BatonError(ErrorKind.UNAVAILABLE, "lost"))
    assert [len(part.token_ids) for part in (outbox.take(), outbox.take()) if part is not None] == [
        MOST_TAKEN,
        1,
    ]
    with pytest.raises(BatonError, match="lost"):
        outbox.take()
