"""Rules by which the next step's rows are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.engine.speculation.policy import DraftPolicy
from baton.engine.speculation.ranked_drafts import Floats
from baton.engine.speculation.size_times import SizeTimes, StepSize

SIZES = (8, 16, 32, 64)
SLOTS = 16


class Rates:
    """Slots whose drafts hold with these chances, at each depth; all have drafts."""

    def __init__(self, chances: list[float], depths: int = 3) -> None:
        self.chances = np.array([*chances, float(np.mean(chances))])
        self.depths = depths

    def running(self) -> Any:
        return np.arange(len(self.chances) - 1)

    def accepted(self, slots: Any) -> Floats:
        return np.cumprod(np.repeat(self.chances[slots][:, None], self.depths, axis=1), axis=1)

    def drafted(self, slots: Any) -> Floats:
        return np.ones((len(slots), self.depths))


class Chooser:
    """A policy for slots of these chances. A step takes 4 ms and `row_s` for each row."""

    def __init__(self, chances: list[float], row_s: float = 1e-5) -> None:
        self.now, self.rates, times = 0.0, Rates(chances), SizeTimes()
        sizes = [StepSize(rows, 4, drafts) for rows in (*SIZES, 4) for drafts in (False, True)]
        times.measured({size: 0.004 + size.rows * row_s for size in sizes})
        rates: Any = self.rates
        self.policy = DraftPolicy(rates, times, SLOTS, SIZES, lambda: self.now)

    def choose(self) -> int:
        self.now += 1
        sequences = len(self.rates.chances) - 1
        return self.policy.choose(sequences, 4 if sequences <= 4 else 8)


@pytest.mark.parametrize(
    ("chance", "row_s", "rows"),
    [
        (0.8, 1e-5, 16),  # as many as four sequences can have
        (0.0, 1e-5, 0),
        (0.3, 1e-5, 16),
        (0.3, 1e-3, 0),  # where a row costs a quarter of a step
        (0.5, 2.5e-4, 8),
        (0.5, 6.67e-4, 8),  # 0.64 tokens a millisecond beside 0.60
    ],
)
def test_drafts_get_rows_where_they_make_more_tokens_a_second(chance: float, row_s: float, rows: int) -> None:
    assert Chooser([chance] * 4, row_s).choose() == rows


def test_a_slot_without_luck_does_not_switch_the_others_off() -> None:
    assert Chooser([0.9, 0.9, 0.0, 0.0]).choose() == 16


def test_limits_of_sequences_come_before_tokens_a_second() -> None:
    """Two sequences whose drafts hold make the more tokens the longer the step; the other two keep their
    limits in shorter ones only."""
    chooser = Chooser([0.95, 0.95, 0.0, 0.0], row_s=1e-4)
    assert chooser.choose() == 16  # 5.6 ms
    for slot in (2, 3):
        chooser.policy.limit(slot, 0.0052)
    assert chooser.choose() == 8  # 4.8 ms
    chooser.policy.limit(2, None)
    chooser.policy.limit(3, None)
    assert chooser.choose() == 16
    chooser.policy.limit_s = 0.0052  # of those that state none
    assert chooser.choose() == 8


def test_drafts_let_sequences_keep_limits_that_plain_steps_miss() -> None:
    chooser = Chooser([0.9] * 4, row_s=1e-5)
    for slot in range(4):
        chooser.policy.limit(slot, 0.0035)
    assert chooser.choose() == 16


def test_no_step_with_drafts_takes_longer_than_the_tightest_limit_allows() -> None:
    """However many tokens it makes: 16 rows take 4.16 ms."""
    chooser = Chooser([0.9] * 4)
    chooser.policy.limit(0, 0.0040)
    assert chooser.choose() == 16
    chooser.policy.limit(0, 0.0033)
    assert chooser.choose() == 8
    chooser.policy.limit(0, 0.0032)
    assert chooser.choose() == 0
    chooser.policy.limit(0, None)
    chooser.policy.limit_s = 0.0033
    assert chooser.choose() == 8


def test_where_drafts_do_not_pay_one_step_of_64_probes() -> None:
    chooser, chosen = Chooser([0.0] * 4), []
    for _ in range(128):
        chosen.append(chooser.choose())
        assert chooser.choose() == chosen[-1], "asked again it says the same"
        chooser.policy.launched(drafts=chosen[-1] > 0)
    assert chosen == [*[0] * 63, 8] * 2


def test_steps_with_drafts_need_no_probing() -> None:
    chooser = Chooser([0.9] * 4)
    for _ in range(100):
        chooser.policy.launched(drafts=True)
    chooser.rates.chances[:] = 0
    assert chooser.choose() == 0


def test_probing_keeps_to_limits() -> None:
    chooser = Chooser([0.0] * 4)
    chooser.policy.limit(1, 0.003)
    for _ in range(200):
        assert chooser.choose() == 0
        chooser.policy.launched(drafts=False)


def test_a_choice_stands_for_a_tenth_of_a_second() -> None:
    chooser = Chooser([0.9] * 4)
    assert chooser.choose() == 16
    chooser.rates.chances[:] = 0
    chooser.now += 0.09
    assert chooser.policy.choose(4, 4) == 16
    chooser.now += 0.02
    assert chooser.policy.choose(4, 4) == 0


def test_before_a_step_was_measured_none_has_drafts() -> None:
    rates: Any = Rates([0.9])
    assert DraftPolicy(rates, SizeTimes(), SLOTS, SIZES).choose(1, 1) == 0


def test_there_are_up_to_eight_sizes() -> None:
    rates: Any = Rates([0.9])
    DraftPolicy(rates, SizeTimes(), SLOTS, range(1, 9))
    with pytest.raises(ValueError, match="up to 8 sizes, not 9"):
        DraftPolicy(rates, SizeTimes(), SLOTS, range(1, 10))


def test_rows_go_to_the_slots_whose_drafts_hold() -> None:
    chooser = Chooser([0.95, 0.0, 0.95, 0.05], row_s=2e-4)
    assert chooser.policy.budgets.tolist() == [3] * SLOTS, "before anything was chosen"
    budgets = []
    for _ in range(8):
        assert chooser.choose() == 8
        budgets.append(chooser.policy.budgets.tolist())
    # Of four rows two go to each of the slots whose drafts hold; the others may have one in one choice of 8.
    assert [each[:4] for each in budgets].count([2, 0, 2, 0]) == 6
    assert [each[1] for each in budgets].count(1) == [each[3] for each in budgets].count(1) == 1
    assert budgets[0][1] == budgets[2][3] == 1, "one slot after the other"
    assert all(each[4:] == [3] * 12 for each in budgets), "of new sequences in other slots nothing is known"


def test_with_rows_enough_each_slot_may_have_all_drafts() -> None:
    chooser = Chooser([0.9, 0.2, 0.9, 0.9])
    assert chooser.choose() == 16
    assert chooser.policy.budgets.tolist() == [3] * SLOTS


def test_probing_steps_try_all_slots() -> None:
    chooser = Chooser([0.95, 0.0, 0.9, 0.05], row_s=2e-4)
    chooser.choose()
    chooser.rates.chances[:] = 0
    for _ in range(63):
        assert chooser.choose() == 0
        chooser.policy.launched(drafts=False)
    assert chooser.choose() == 8
    assert chooser.policy.budgets.tolist() == [3] * SLOTS


def test_sequences_that_had_no_step_are_expected_to_be_like_all() -> None:
    chooser = Chooser([0.9, 0.9], row_s=2e-4)
    chooser.rates.chances[-1] = 0.0
    chooser.now = 1
    assert chooser.policy.choose(4, 4) == 8
    assert chooser.policy.budgets[:2].tolist() == [2, 2]
    chooser.rates.chances[:2], chooser.rates.chances[-1] = 0.0, 0.9
    chooser.now = 2
    assert chooser.policy.choose(4, 4) == 8
    assert sorted(chooser.policy.budgets[:2].tolist()) in ([0, 0], [0, 1])


def test_what_is_expected_of_other_numbers_of_sequences() -> None:
    """The sequences are like all others: four have drafts where eight have none."""
    chooser = Chooser([0.5] * 4, row_s=6e-4)
    for sequences, tokens in ((4, 1.5), (1, 1.875)):
        found = chooser.policy.expected(sequences, sequences)
        assert found == pytest.approx((8, tokens))
    assert chooser.policy.expected(8, 8) == (8, 1)
    rates: Any = Rates([0.9])
    assert DraftPolicy(rates, SizeTimes(), SLOTS, SIZES).expected(3, 4) == (4, 1)


def test_what_is_expected_stands_for_a_while() -> None:
    chooser = Chooser([0.9] * 4)
    found = chooser.policy.expected(4, 4)
    chooser.rates.chances[:] = 0
    chooser.now = 0.29
    assert chooser.policy.expected(4, 4) == found
    chooser.now = 0.3
    assert chooser.policy.expected(4, 4) == (4, 1)
    chooser.rates.chances[:] = 0.9
    chooser.now = 0.55
    assert chooser.policy.expected(4, 4) == (4, 1)


def test_a_choice_that_is_a_tenth_of_a_second_old_is_made_anew() -> None:
    chooser = Chooser([0.9] * 4)
    assert chooser.policy.choose(4, 4) == 16
    chooser.rates.chances[:] = 0
    chooser.now = 0.1
    assert chooser.policy.choose(4, 4) == 0


def test_probing_steps_have_a_row_for_a_draft_of_each() -> None:
    """Six sequences have room for two drafts in steps of eight rows."""
    chooser = Chooser([0.0] * 6)
    for _ in range(63):
        assert chooser.choose() == 0
        chooser.policy.launched(drafts=False)
    assert chooser.choose() == 16


def test_a_step_may_take_just_as_long_as_the_tightest_limit_allows() -> None:
    chooser = Chooser([0.9] * 4, row_s=0.0)
    chooser.policy.limit(0, 0.0032)
    assert chooser.choose() == 16
    chooser.policy.limit(0, 0.0031)
    assert chooser.choose() == 0


def policy_of(chances: list[float], **seconds: float) -> DraftPolicy:
    """One of four sequences; `seconds` of plain steps of 4 and 16 rows, and of those with drafts."""
    rates: Any = Rates(chances)
    times = SizeTimes()
    sizes = {"plain": (4, False), "plain_16": (16, False), "drafts_8": (8, True), "drafts_16": (16, True)}
    times.measured(
        {
            StepSize(rows, 4, drafts): seconds[name]
            for name, (rows, drafts) in sizes.items()
            if name in seconds
        }
    )
    made = [rows for name, (rows, drafts) in sizes.items() if drafts and name in seconds]
    return DraftPolicy(rates, times, SLOTS, made, lambda: 0.0)


def test_limits_hold_for_what_steps_with_drafts_take() -> None:
    """Attention of several rows makes them longer than plain ones of as many rows."""
    policy = policy_of([0.9] * 4, plain=0.004, plain_16=0.004, drafts_16=0.006)
    policy.limit(0, 0.004)
    assert policy.choose(4, 4) == 0


def test_plain_steps_take_what_plain_steps_take() -> None:
    """Also of as many rows as one with drafts has: 1,000 tokens a second beside 945."""
    assert policy_of([0.3] * 4, plain_16=0.004, drafts_16=0.006).choose(4, 16) == 0


def test_a_sequence_that_just_keeps_its_limit_counts() -> None:
    policy = policy_of([0.9, 0.9, 0.9, 0.0], plain=0.004, drafts_8=0.0041)
    assert policy.choose(4, 4) == 8
    policy = policy_of([0.9, 0.9, 0.9, 0.0], plain=0.004, drafts_8=0.0041)
    policy.limit(3, 0.004)
    assert policy.choose(4, 4) == 0


def test_a_limit_is_of_the_time_for_each_token() -> None:
    """A step that takes longer than it gives out three tokens."""
    policy = policy_of([0.9] * 4, plain=0.004, drafts_16=0.0047)
    for slot in range(4):
        policy.limit(slot, 0.0045)
    assert policy.choose(4, 4) == 16


class Asked(SizeTimes):
    """Keeps which steps with drafts it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = set[int]()

    def expected_s(self, size: StepSize) -> float:
        if size.drafts:
            self.rows.add(size.rows)
        return super().expected_s(size)


def test_no_size_is_considered_that_has_rows_for_more_drafts_than_there_may_be() -> None:
    """Three drafts each: two sequences have eight rows, three have twelve."""
    rates: Any = Rates([0.9] * 3)
    times = Asked()
    times.measured({StepSize(rows, 2, drafts): 0.004 for rows in SIZES for drafts in (False, True)})
    policy = DraftPolicy(rates, times, SLOTS, SIZES, lambda: 0.0)
    policy.choose(2, 2)
    assert times.rows == {8}
    policy.choose(3, 4)
    assert times.rows == {8, 16}


def test_a_step_without_a_row_to_spare_probes_nothing() -> None:
    policy = policy_of([0.0] * 8, plain=0.004, drafts_8=0.004)
    for _ in range(100):
        policy.launched(drafts=False)
    assert policy.choose(8, 8) == 0
    assert policy.choose(7, 8) == 8
