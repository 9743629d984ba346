"""A request's claim on its workers is counted until each part of it ends, once."""

from __future__ import annotations

import pytest

from services.router.placement.claim import Claim, PrefillClaim
from services.router.workers.links import Links
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import placement_of, workers_of

PREFILL, DECODE, BOTH = "prefill-0", "decode-0", "both-0"


def counters(worker: Worker) -> tuple[int, int, int]:
    return worker.queued_tokens, worker.claimed_slots, worker.reserved_tokens


def counting_changes(worker: Worker) -> list[str]:
    changes: list[str] = []
    worker.changed = lambda: changes.append(worker.name)
    return changes


def test_a_claim_is_counted_until_its_parts_end() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    prefill.queued_tokens, decode.claimed_slots, decode.reserved_tokens = 3, 2, 70
    prefilled, released = counting_changes(prefill), counting_changes(decode)
    claim = Claim(prefill, decode, 50, 60)
    assert (counters(prefill), counters(decode)) == ((53, 0, 0), (0, 3, 130))
    assert (prefilled, released) == ([], [])
    for _ in range(2):
        claim.prefill_ended()
        assert (counters(prefill), counters(decode)) == ((3, 0, 0), (0, 3, 130))
        assert (prefilled, released) == ([PREFILL], [])
    for _ in range(2):
        claim.release()
        assert (counters(prefill), counters(decode)) == ((3, 0, 0), (0, 2, 70))
        assert (prefilled, released) == ([PREFILL], [DECODE])


def test_a_release_ends_prefill_too() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    prefilled = counting_changes(prefill)
    Claim(prefill, decode, 50, 60).release()
    assert counters(prefill) == counters(decode) == (0, 0, 0)
    PrefillClaim(prefill, 1).release()
    assert counters(prefill) == (0, 0, 0)
    assert prefilled == [PREFILL, PREFILL]


def test_the_end_of_a_prompt_without_tokens_to_compute_changes_nothing() -> None:
    (prefill,) = workers_of(PREFILL)
    changes = counting_changes(prefill)
    PrefillClaim(prefill, 0).release()
    assert changes == []


def test_a_prompt_may_start_before_its_reservation_if_decode_certainly_has_a_slot() -> None:
    prefill, decode, both = workers_of(PREFILL, DECODE, BOTH)
    assert Claim(prefill, decode, 1, 1).has_certain_room
    assert not Claim(both, both, 1, 1).has_certain_room
    decode.others.other_router_slots = 1
    assert not Claim(prefill, decode, 1, 1).has_certain_room


def test_a_claim_counts_uncached_tokens_at_prefill_and_all_tokens_at_decode() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    placement = placement_of([prefill, decode])
    assert isinstance(placement.pick(50, 10), Claim)
    assert (counters(prefill), counters(decode)) == ((50, 0, 0), (0, 1, 60))
    assert isinstance(placement.pick(50, 10, lambda worker: 48 if worker is prefill else 0), Claim)
    assert (counters(prefill), counters(decode)) == ((52, 0, 0), (0, 2, 120))


def test_a_claim_without_predictions_takes_its_tokens_and_nothing_else() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    assert PrefillClaim(prefill, 7).cost == Claim(prefill, decode, 7, 60).cost == 7.0
    assert Claim(prefill, decode, 7, 60, cost=70.5).cost == 70.5
    assert prefill.backlog.wait_s == 0.0
    assert decode.claimed_context == 0


def test_what_a_claim_takes_besides_tokens_is_given_back() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    claim = Claim(prefill, decode, 50, 60, seconds=2.0, context=55, tpot_s=0.1)
    assert prefill.backlog.wait_s == pytest.approx(2.0, abs=0.5)
    assert (decode.claimed_context, decode.tpot_limits) == (55, [0.1])
    claim.release()
    assert prefill.backlog.wait_s == 0.0
    assert (decode.claimed_context, decode.tpot_limits) == (0, [])


async def test_a_request_that_tries_a_link_again_says_how_that_went() -> None:
    """One at a time is sent over a link whose pause is over."""
    prefill, decode = workers_of(PREFILL, DECODE)
    now = 0.0
    links = prefill.links = Links(PREFILL, lambda: None, lambda: now)
    Claim(prefill, decode, 1, 1).link_failed("cut")
    assert links.take_news() == [(decode, "cut")]
    for pause_s, end in ((1.0, "link_failed"), (2.0, "release"), (0.0, "handed_off")):
        assert links.usable(decode) is (pause_s == 0.0)
        now += pause_s
        assert links.usable(decode)
        claim = Claim(prefill, decode, 1, 1)
        assert not links.usable(decode), "it is being tried"
        if end == "link_failed":
            claim.link_failed("cut again")
            assert links.take_news() == [(decode, "cut again")]
        elif end == "handed_off":
            claim.handed_off()
            assert links.take_news() == [(decode, "")]
        claim.release()
    assert links.usable(decode)


async def test_a_request_gives_back_its_own_try_alone() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    now = 0.0
    links = prefill.links = Links(PREFILL, lambda: None, lambda: now)
    links.failed(decode, "cut")
    now = 5.0
    first, second = Claim(prefill, decode, 1, 1), Claim(prefill, decode, 1, 1)
    first.release()
    first.release()
    assert not links.usable(decode), "the second one is being tried"
    second.release()
    assert links.usable(decode)


async def test_a_worker_has_no_link_to_itself() -> None:
    (both,) = workers_of(BOTH)
    now = 0.0
    links = both.links = Links(BOTH, lambda: None, lambda: now)
    links.failed(both, "never")
    claim = Claim(both, both, 1, 1)
    now = 5.0
    assert links.usable(both), "no try is counted"
    links.take_news()
    claim.handed_off()
    assert links.take_news() == []


def test_the_time_to_the_first_token_is_counted_from_the_claim() -> None:
    prefill, decode = workers_of(PREFILL, DECODE)
    claim = Claim(prefill, decode, 50, 60)
    claim.prefill_ended()
    claim.decoded(4, 0.01)
    assert 0 <= decode.first_token_s.value < 5
    assert decode.first_token_s.own.number == 1
