"""A request's claim on its workers is counted until each part of it ends, once."""

from __future__ import annotations

from services.router.placement.claim import Claim, PrefillClaim
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
