"""The chart's scalers in virtual time: they see an overload and ask for what it needs, and no more."""

from __future__ import annotations

import pytest

from tests.scaling.scenarios import (
    DAY,
    FLASH_AT,
    STEP_AT,
    STEP_END,
    STEP_OVER,
    Outcome,
    chart,
    enough,
    former,
    needed,
    outcome,
    rates,
)

# A decode worker with blocks for half of its slots is full by its blocks.
SLOTS = 20
ALLOWED_S = 90.0


def _allowed(number: int) -> int:
    return max(number + 1, int(number * 1.25))


def _check_step(role: str, found: Outcome) -> None:
    wanted = needed(role, rates("step", role)[0](STEP_AT))
    run = found.run
    least = enough(role, rates("step", role)[0](STEP_AT))
    reached = min(at for at, number in run.changes if at >= STEP_AT and number >= least)
    assert reached - STEP_AT <= ALLOWED_S
    assert run.most(STEP_AT, STEP_OVER) <= _allowed(wanted)
    assert run.most(STEP_END - 1, STEP_END) >= least
    assert run.unsafe == 0
    assert run.reversals <= 2 * STEP_OVER / 3600
    # And back: what is left after the stabilisation and the steps down.
    assert run.changes[-1][1] < wanted


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
def test_a_step_is_answered_with_what_it_needs(role: str) -> None:
    _check_step(role, outcome("step", role, 120.0, chart, slots=SLOTS))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start_s", [60.0, 300.0])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_is_answered_however_long_workers_take_to_start(role: str, start_s: float) -> None:
    _check_step(role, outcome("step", role, start_s, chart, slots=SLOTS))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_former_triggers_miss_the_step(role: str) -> None:
    """The proof that the test above can fail."""
    run = outcome("step", role, 120.0, former, slots=SLOTS).run
    assert run.most(STEP_AT, STEP_END) < enough(role, rates("step", role)[0](STEP_AT))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_flash_crowd_asks_for_no_more_than_it_needs(role: str) -> None:
    run = outcome("flash", role, 120.0, chart, slots=SLOTS).run
    wanted = needed(role, rates("flash", role)[0](FLASH_AT))
    assert run.most(FLASH_AT, 3600.0) <= _allowed(wanted)
    assert run.unsafe == 0
    assert run.reversals <= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_day_costs_little_more_than_one_that_is_known_before(role: str) -> None:
    found = outcome("day", role, 120.0, chart, slots=SLOTS)
    assert found.run.hours <= 1.15 * found.known_hours
    assert found.run.unsafe == 0
    assert found.run.reversals <= 2 * DAY / 3600
