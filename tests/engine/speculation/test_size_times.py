"""Seconds of steps by rows and sequences: measured ones, and those of steps that run."""

from __future__ import annotations

import math

import pytest

from baton.engine.speculation.size_times import SizeTimes, StepSize


def drafting(rows: int, sequences: int = 4) -> StepSize:
    return StepSize(rows, sequences, drafts=True)


def plain(rows: int, sequences: int = 4) -> StepSize:
    return StepSize(rows, sequences, drafts=False)


def test_kinds_that_never_ran_are_expected_to_be_like_the_nearest() -> None:
    times = SizeTimes()
    assert times.is_empty
    assert times.expected_s(drafting(8)) == times.at_most_s(drafting(8)) == 0
    times.observe(plain(4), 0.004)
    assert not times.is_empty
    assert (times.expected_s(drafting(8)), times.at_most_s(drafting(8))) == (0.004, 0.008)
    assert times.at_most_s(drafting(2)) == 0.004
    times.observe(drafting(8), 0.005)
    assert times.expected_s(drafting(8)) == times.at_most_s(drafting(8)) == 0.005
    assert times.expected_s(plain(8)) == 0.005, "of as many rows, though with drafts"
    assert times.expected_s(drafting(5)) == 0.004, "of nearly as many, though without"


def test_times_are_linear_between_numbers_of_sequences() -> None:
    times = SizeTimes()
    times.measured({drafting(64, 8): 0.005, drafting(64, 32): 0.008})
    assert times.expected_s(drafting(64, 1)) == 0.005
    assert times.expected_s(drafting(64, 8)) == 0.005
    assert times.expected_s(drafting(64, 20)) == pytest.approx(0.0065)
    assert times.expected_s(drafting(64, 32)) == times.expected_s(drafting(64, 60)) == 0.008


def test_a_step_is_not_expected_to_take_longer_than_one_of_more_rows() -> None:
    times = SizeTimes()
    times.measured({plain(48, 48): 0.010, drafting(64, 8): 0.005, drafting(64, 32): 0.009})
    assert times.expected_s(plain(48, 32)) == 0.009
    assert times.expected_s(plain(48, 47)) == 0.009
    # So many sequences were never seen in steps of 64 rows.
    assert times.expected_s(plain(48, 48)) == 0.010
    times.measured({drafting(48, 48): 0.008})
    assert times.expected_s(plain(48, 48)) == 0.008, "of as many rows"
    times.measured({plain(64, 64): 0.0075})
    assert times.expected_s(plain(48, 48)) == 0.0075, "of more rows, without drafts"
    times.measured({plain(96, 48): 0.001})
    assert times.expected_s(drafting(64, 32)) == 0.009, "steps without drafts are no bound of those with"


def test_times_are_corrected_while_running() -> None:
    """Contexts make all kinds longer; one that was measured wrong at the start is found out."""
    times = SizeTimes()
    times.measured({plain(4): 0.004, drafting(8): 0.004})
    for _ in range(600):
        times.observe(plain(4), 0.005)
        times.observe(drafting(8), 0.006)
    assert times.expected_s(plain(4)) == pytest.approx(0.005, rel=0.02)
    assert times.expected_s(drafting(8)) == pytest.approx(0.006, rel=0.02)


def test_what_all_kinds_have_in_common_is_learned_from_any() -> None:
    times = SizeTimes()
    times.measured({plain(4): 0.004, drafting(8): 0.005})
    times.observe(plain(4), 0.005)
    assert times.expected_s(plain(4)) == pytest.approx(0.00406)
    assert times.expected_s(drafting(8)) == pytest.approx(0.00505)


def test_numbers_of_sequences_are_corrected_apart() -> None:
    times = SizeTimes()
    times.measured({drafting(64, 8): 0.005, drafting(64, 32): 0.005})
    for _ in range(1500):
        times.observe(drafting(64, 8), 0.005)
        times.observe(drafting(64, 32), 0.009)
        times.observe(drafting(64, 16), 0.006)
    for sequences, seconds in ((8, 0.005), (16, 0.006), (32, 0.009)):
        assert times.expected_s(drafting(64, sequences)) == pytest.approx(seconds, rel=0.02)
    # One between two that are known corrects both, as near as it is.
    low, middle, high = (times.expected_s(drafting(64, sequences)) for sequences in (16, 20, 32))
    times.observe(drafting(64, 20), middle + 0.001)
    assert times.expected_s(drafting(64, 16)) - low == pytest.approx(0.05e-3 + 0.0075e-3)
    assert times.expected_s(drafting(64, 32)) - high == pytest.approx(0.05e-3 + 0.0025e-3)


@pytest.mark.parametrize("sequences", [1, 2, 16, 64])
def test_so_many_sequences_as_never_before_take_what_they_take(sequences: int) -> None:
    times = SizeTimes()
    times.measured({drafting(64, 4): 0.004, drafting(64, 10): 0.004})
    times.observe(drafting(64, sequences), 0.007)
    assert times.expected_s(drafting(64, sequences)) == pytest.approx(0.007, rel=0.03)
    assert times.expected_s(drafting(64, 5)) == pytest.approx(0.004, rel=0.05)


@pytest.mark.parametrize("sequences", [4, 16])
def test_of_the_first_steps_the_shortest_counts(sequences: int) -> None:
    """A first one that was delayed does not keep its kind from running for thousands of steps."""
    times = SizeTimes()
    times.observe(plain(4), 0.060)
    times.observe(drafting(8, 20 - sequences), 0.070)
    times.observe(drafting(8, sequences), 0.600)
    for _ in range(6):
        times.observe(drafting(8, sequences), 0.075)
    assert times.expected_s(drafting(8, sequences)) <= 0.075
    assert times.expected_s(plain(4)) == pytest.approx(0.060, rel=0.05), "what all have in common stays"
    for _ in range(500):
        times.observe(drafting(8, sequences), 0.100)
    assert times.expected_s(drafting(8, sequences)) == pytest.approx(0.100, rel=0.02)


@pytest.mark.parametrize("sequences", [3, 14])
def test_nearly_so_many_sequences_correct_those_that_are_known(sequences: int) -> None:
    times = SizeTimes()
    times.measured({drafting(64, 4): 0.004, drafting(64, 10): 0.004})
    times.observe(drafting(64, sequences), 0.005)
    assert times.expected_s(drafting(64, sequences)) == pytest.approx(0.00406)


def test_steps_that_something_delays_are_left_out_until_all_are() -> None:
    times = SizeTimes()
    times.measured({plain(4): 0.004})
    for _ in range(2):
        for _ in range(8):
            times.observe(plain(4), 0.1)
        assert times.expected_s(plain(4)) == 0.004
        times.observe(plain(4), 0.004)
    for _ in range(9):
        times.observe(plain(4), 0.1)
    assert 0.004 < times.expected_s(plain(4)) < math.inf
    times.observe(plain(4), 0.1)
    assert times.expected_s(plain(4)) < 0.02


def test_a_step_of_twice_the_expected_time_is_still_believed() -> None:
    times = SizeTimes()
    times.measured({plain(4): 0.004})
    times.observe(plain(4), 0.008)
    assert times.expected_s(plain(4)) == pytest.approx(0.00424)


def test_a_kind_that_runs_for_the_first_time_takes_what_it_takes() -> None:
    times = SizeTimes()
    times.measured({plain(4): 0.004})
    times.observe(plain(4), 0.006)
    times.observe(drafting(8), 0.007)
    assert times.expected_s(drafting(8)) == pytest.approx(0.007)


def test_numbers_of_sequences_that_differ_by_half_are_apart() -> None:
    times = SizeTimes()
    times.measured({drafting(64, 6): 0.004, drafting(64, 12): 0.004})
    times.observe(drafting(64, 4), 0.007)
    assert times.expected_s(drafting(64, 4)) == pytest.approx(0.00715), "known by itself"
    times.observe(drafting(64, 18), 0.007)
    assert times.expected_s(drafting(64, 18)) == pytest.approx(0.007 + 0.05 * 0.00285)
    assert times.expected_s(drafting(64, 12)) == pytest.approx(0.004 + 0.00015 + 0.05 * 0.00285)


def test_numbers_of_sequences_between_two_are_known_by_themselves_where_both_are_far() -> None:
    times = SizeTimes()
    times.measured({drafting(64, 4): 0.004, drafting(64, 9): 0.004})
    times.observe(drafting(64, 6), 0.005)  # not far: both are corrected
    assert times.expected_s(drafting(64, 4)) == pytest.approx(0.004 + 0.00005 + 0.000006)
    times = SizeTimes()
    times.measured({drafting(64, 4): 0.004, drafting(64, 16): 0.004})
    times.observe(drafting(64, 8), 0.005)
    assert times.expected_s(drafting(64, 4)) == pytest.approx(0.00405)
    assert times.expected_s(drafting(64, 8)) == pytest.approx(0.00406)


def test_of_eight_first_steps_each_that_is_shorter_counts_whole() -> None:
    times = SizeTimes()
    for number in range(8):
        times.observe(plain(4), 0.010 - 0.001 * number)
        assert times.expected_s(plain(4)) == pytest.approx(0.010 - 0.001 * number, rel=1e-12)
    times.observe(plain(4), 0.002)
    assert times.expected_s(plain(4)) == pytest.approx(0.003 - 0.06 * 0.001, rel=1e-12)


def test_a_first_step_that_is_longer_corrects_what_is_expected() -> None:
    times = SizeTimes()
    times.observe(plain(4), 0.010)
    times.observe(plain(4), 0.012)
    assert times.expected_s(plain(4)) == pytest.approx(0.010 + 0.06 * 0.002, rel=1e-12)


def test_a_number_of_sequences_between_two_has_first_steps_of_its_own() -> None:
    times = SizeTimes()
    times.measured({plain(64, 8): 0.005, plain(64, 64): 0.005})
    times.observe(plain(64, 24), 0.005)
    times.observe(plain(64, 24), 0.003)
    assert times.expected_s(plain(64, 24)) == pytest.approx(0.003, rel=1e-12)
    assert times.expected_s(plain(64, 8)) == pytest.approx(0.005, rel=1e-12)
