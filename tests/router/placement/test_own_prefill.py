"""Prompts that a worker of role both computes itself or has computed elsewhere, whichever delays less."""

from __future__ import annotations

from baton.perf_model.step_costs import StepCosts
from services.router.placement.placement import NoRoom
from services.router.request.slo import Due
from services.router.workers.recent_work import PrefillShare
from services.router.workers.worker import Worker
from tests.router.workers.bare_workers import bare_worker, placement_of

PREFILL, BOTH = "prefill-0", "both-0"


def with_costs(worker: Worker) -> Worker:
    """Step costs by which a prompt of 1,000 tokens takes 100 ms, and a step 10."""
    worker.costs = StepCosts(prefill_token_s=1e-4, decode_step_s=0.01)
    return worker


def test_a_combined_worker_computes_what_delays_less_there() -> None:
    prefill = with_costs(bare_worker(PREFILL))
    both = with_costs(bare_worker(BOTH, receives_handoffs=True, slots=64))
    placement = placement_of([prefill, both], ahead=10**6)

    def placed_by(tokens: int, cached: int = 0, behind: int = 0) -> str:
        claim = placement.pick(
            tokens, 10, lambda worker: cached if worker is both else 0, behind=lambda: behind
        )
        assert not isinstance(claim, NoRoom)
        assert claim.decode is both
        claim.release()
        both.prefill_share = PrefillShare()
        return f"{claim.prefill.name}: {claim.reason}"

    own, other = f"{BOTH}: own prefill: ", f"{PREFILL}: other prefill: "
    assert placed_by(1000) == own + "0 limits missed, all delayed by 100 ms; other: 0, 102 ms"
    both.claimed_slots = 20  # streams that each lose 100 ms
    assert placed_by(1000) == other + "0 limits missed, all delayed by 102 ms; own: 0, 2100 ms"
    assert placed_by(1000, cached=999).startswith(own), "one token takes next to nothing"
    assert placed_by(1000, behind=24).startswith(own), "as many that wait would wait for it"
    both.tpot_limits = [0.0106]  # what 10 ms and a twentieth of the time with prefill exceed
    assert placed_by(1000, behind=24).startswith(other + "0 limits missed")
    assert placement.placed == {"own": 3, "other": 2, "spare": 0}


def test_delays_count_by_how_near_requests_are_to_their_limits() -> None:
    prefill = with_costs(bare_worker(PREFILL))
    both = with_costs(bare_worker(BOTH, receives_handoffs=True, slots=64))
    placement = placement_of([prefill, both], ahead=10**6)
    both.claimed_slots = 20

    def computed_by(tpot_limit_s: float, due: Due | None = None) -> str:
        both.tpot_limits = [tpot_limit_s] * 20
        claim = placement.pick(1000, 10, behind=lambda: 5, due=lambda: due)
        assert not isinstance(claim, NoRoom)
        claim.release()
        both.prefill_share = PrefillShare()
        return claim.prefill.name

    # Steps of 10.5 ms: the streams' delay of 2 s beside 0.6 s of those that wait.
    assert computed_by(1.0) == BOTH, "it costs streams next to nothing"
    assert computed_by(0.0125) == PREFILL, "they are near their limit"
    assert computed_by(0.0125, Due(1.8, limit_s=2.0)) == PREFILL, "its first token has time"
    assert computed_by(0.0125, Due(0.5, limit_s=2.0)) == BOTH, "most of its time is gone"
    assert computed_by(0.0125, Due(0.5)) == PREFILL, "a deadline says nothing of how long it has waited"


def test_without_exchange_a_combined_worker_computes_its_own_prompts() -> None:
    prefill, both = with_costs(bare_worker(PREFILL)), with_costs(bare_worker(BOTH, slots=64))
    both.claimed_slots = 20
    claim = placement_of([prefill, both]).pick(50, 10)
    assert not isinstance(claim, NoRoom)
    assert (claim.prefill, claim.decode, claim.reason) == (both, both, "")
