"""The rows of a step, and who gets those that are left."""

from __future__ import annotations

import random

import pytest
import torch

from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import Source
from baton.engine.speculation.verification_rows import VerificationRows, share_rows, usable_drafts


@pytest.mark.parametrize(
    ("wanted", "spare", "turn", "given"),
    [
        ([7, 7, 7], 4, 0, [2, 1, 1]),
        ([7, 7, 7], 4, 2, [1, 1, 2]),
        ([7, 7, 7], 5, 2, [2, 1, 2]),
        ([0, 3, 1], 3, 0, [0, 2, 1]),
        ([0, 3, 1], 100, 1, [0, 3, 1]),
        ([7], 0, 0, [0]),
        ([9], 100, 0, [7]),
        ([7, 1], -1, 0, [0, 0]),
    ],
)
def test_each_slot_has_its_first_draft_before_any_has_its_second(
    wanted: list[int], spare: int, turn: int, given: list[int]
) -> None:
    assert share_rows(torch.tensor(wanted), spare, turn).tolist() == given


def test_over_the_turns_all_get_as_much() -> None:
    wanted = torch.full((5,), 7)
    total = sum(share_rows(wanted, 7, turn) for turn in range(5))
    assert total.tolist() == [7] * 5  # type: ignore[union-attr]


def test_rows_of_a_slot_lie_side_by_side() -> None:
    drafts = torch.arange(3 * MOST_DRAFTS).view(3, MOST_DRAFTS) + 100
    rows = VerificationRows.of(
        torch.tensor([4, 1, 2]), torch.tensor([9, 8, 7]), torch.tensor([30, 20, 10]), drafts,
        torch.tensor([2, 0, 1]),
    )  # fmt: skip
    assert rows.slot.tolist() == [4, 4, 4, 1, 2, 2]
    assert rows.token.tolist() == [9, 100, 101, 8, 7, 114]
    assert rows.position.tolist() == [30, 31, 32, 20, 10, 11]
    assert rows.depth.tolist() == [0, 1, 2, 0, 0, 1]
    assert rows.begins.tolist() == [0, 3, 4, 6]
    before = [[], [100], [100, 101], [], [], [114]]
    assert rows.drafts_before().tolist() == [row + [-1] * (MOST_DRAFTS - len(row)) for row in before]


def test_rows_without_drafts_are_one_a_slot() -> None:
    draw = random.Random(2)
    slots, tokens = torch.tensor([5, 3]), torch.tensor([draw.randrange(97) for _ in range(2)])
    rows = VerificationRows.plain(slots, tokens, torch.tensor([0, 7]))
    assert (rows.slot.tolist(), rows.token.tolist(), rows.depth.tolist()) == ([5, 3], tokens.tolist(), [0, 0])
    assert (rows.position.tolist(), rows.begins.tolist()) == ([0, 7], [0, 1, 2])


@pytest.mark.parametrize(
    ("bound", "usable"),
    [
        ({}, 7),
        ({"counts": 0}, 0),
        ({"counts": 3}, 3),
        ({"most": 2}, 2),
        ({"capacity": 11}, 0),  # its blocks hold the last token alone
        ({"capacity": 12}, 1),
        ({"capacity": 10}, 0),
        ({"end": 12}, 0),  # the next token is the last one
        ({"end": 13}, 1),
        ({"end": 11}, 0),
        ({"masked": 1}, 0),
    ],
)
def test_drafts_that_no_row_could_verify_are_left_out(bound: dict[str, int], usable: int) -> None:
    """The last token is at position 10."""
    given = {"counts": 7, "most": 7, "position": 10, "capacity": 90, "end": 90, "masked": 0} | bound
    columns = {name: torch.tensor([value, value]) for name, value in given.items()}
    columns["masked"] = columns["masked"].bool()
    assert usable_drafts(**columns).tolist() == [usable, usable]


def test_progress_counts_rows_that_count() -> None:
    drafts = torch.zeros(3, MOST_DRAFTS)
    rows = VerificationRows.of(
        torch.tensor([4, 1, 2]), torch.zeros(3), torch.zeros(3), drafts, torch.tensor([3, 0, 2])
    )
    counts = torch.tensor([True, True, False, False, True, True, True, True])
    assert rows.given(counts).tolist() == [2, 1, 3]
    sources = torch.tensor([Source.PREDICTION, Source.TEXT, Source.TABLE])
    assert rows.progress(counts, sources).tolist() == [
        [1, 3, 1, 3, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0], [1, 2, 2, 0, 0, 2, 2],
    ]  # fmt: skip
    assert rows.progress(counts, torch.zeros(3)).tolist()[0] == [1, 3, 1, 0, 0, 0, 0]
