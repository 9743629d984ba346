"""The order in which the masks of several sequences are computed."""

from __future__ import annotations

import math
from typing import Any, cast

from services.grammar.launch import SlotKey
from services.grammar.process import FollowedSequence, compute_due


class Due:
    """Due masks of these costs, of sequences in slots 0, 1, 2 and so on; `computed`: the slots whose masks
    were computed."""

    def __init__(self, *costs_s: float) -> None:
        self.due = [
            FollowedSequence((slot, 1), cast(Any, None), 0, cost) for slot, cost in enumerate(costs_s)
        ]
        self.followed: dict[SlotKey, FollowedSequence] = {one.key: one for one in self.due}
        self.computed: list[int] = []

    def turn(self, turn_s: float = math.inf) -> None:
        compute_due(self.due, self.followed, lambda one: self.computed.append(one.key[0]), turn_s)


def test_those_that_were_cheap_come_first_and_unknown_ones_last() -> None:
    masks = Due(0.02, 0.0001, math.inf, 0.0002)
    masks.turn()
    assert masks.computed == [1, 3, 0, 2]
    assert masks.due == []
    assert all(0 <= one.cost_s < math.inf for one in masks.followed.values()), "measured anew"


def test_a_turn_ends_with_the_mask_that_fills_it() -> None:
    masks = Due(0.1, 0.2, 0.3)
    masks.turn(0.0)
    assert masks.computed == []
    masks.turn(1e-9)
    assert masks.computed == [0]
    assert [one.key[0] for one in masks.due] == [2, 1]


def test_those_that_have_left_their_slot_are_dropped() -> None:
    masks = Due(0.1, 0.2)
    del masks.followed[1, 1]
    masks.followed[0, 1] = FollowedSequence((0, 1), cast(Any, None), 0)  # the slot's next sequence
    masks.turn()
    assert masks.computed == []
    assert masks.due == []
