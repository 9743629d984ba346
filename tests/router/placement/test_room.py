"""Room under a limit, for a request of which workers have cached different parts."""

from __future__ import annotations

import pytest

from services.router.placement.placement import NoRoom
from services.router.placement.room import Waits
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import bare_worker, placement_of

LIMIT_S, TOKENS = 0.006, 400


def combined(name: str, sequences: int, each_s: float = 0.0005) -> Worker:
    """Each sequence makes a step of 5 ms 0.5 ms longer: two of them leave no room under the limit."""
    worker = bare_worker(name)
    rates = worker.described.load.rates
    rates.decode_step_s, rates.decode_sequence_s, rates.prefill_token_s = 0.005, each_s, 2e-5
    worker.claimed_slots, worker.tpot_limits = sequences, [LIMIT_S] * sequences
    return worker


def chosen(full: Worker, other: Worker, cached: tuple[int, int], waits: Waits) -> str:
    """The decode worker of a request, or why it has none."""
    found = placement_of([full, other]).pick(
        TOKENS, 10, dict(zip((full, other), cached, strict=True)).__getitem__, tpot_s=LIMIT_S,
        waits=lambda: waits,
    )  # fmt: skip
    return found.name if isinstance(found, NoRoom) else found.decode.name


@pytest.mark.parametrize(
    ("cached", "waits", "name"),
    [
        ((380, 0), Waits.FOR_ITSELF, "CACHED"),
        ((380, 300), Waits.FOR_ITSELF, "both-1"),  # 100 tokens in place of 20
        ((0, 0), Waits.FOR_ITSELF, "both-1"),
        ((200, 0), Waits.FOR_ITSELF, "both-1"),  # 400 in place of 200
        ((300, 100), Waits.FOR_ITSELF, "CACHED"),  # 300 in place of 100
        ((380, 0), Waits.FOR_OTHERS, "both-1"),
    ],
)
def test_a_request_that_has_time_waits_for_the_worker_that_has_it_cached(
    cached: tuple[int, int], waits: Waits, name: str
) -> None:
    assert chosen(combined("both-0", 2), combined("both-1", 0), cached, waits) == name


@pytest.mark.parametrize(("sequences", "name"), [(4, "both-1"), (7, "CACHED")])
def test_where_there_is_much_room_nothing_waits_for_another(sequences: int, name: str) -> None:
    """For 8 sequences: with 4 there is room for 4 more, and with 7 for one."""
    other = combined("both-1", sequences, 0.0001)
    assert chosen(combined("both-0", 2), other, (380, 0), Waits.FOR_ITSELF) == name


def test_nothing_waits_for_a_worker_that_is_gone() -> None:
    full = combined("both-0", 2)
    full.following = False
    assert chosen(full, combined("both-1", 0), (380, 0), Waits.FOR_ITSELF) == "both-1"
