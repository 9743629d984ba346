"""In which order the masks of several sequences are computed."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from services.grammar.process import MaskLoop, _Followed


def loop_with(*costs_s: float) -> tuple[MaskLoop, list[int]]:
    """A loop with a due mask for each of these costs, in slots 0, 1, 2 and so on; and the slots whose masks
    were computed."""
    nothing = cast(Any, None)
    loop = MaskLoop(nothing, nothing, nothing, nothing)
    for slot, cost_s in enumerate(costs_s):
        one = _Followed((slot, 1), nothing, 0, cost_s)
        loop._followed[one.key] = one
        loop._due.append(one)
    computed: list[int] = []
    loop._compute = lambda one: computed.append(one.key[0])  # type: ignore[method-assign]
    return loop, computed


def test_those_that_were_cheap_come_first_and_unknown_ones_last() -> None:
    loop, computed = loop_with(0.02, 0.0001, math.inf, 0.0002)
    followed = list(loop._due)
    loop._compute_due()
    assert computed == [1, 3, 0, 2]
    assert loop._due == []
    assert all(0 <= one.cost_s < math.inf for one in followed), "measured anew"


def test_a_turn_ends_with_the_mask_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.grammar.process._TURN_S", 0.0)
    loop, computed = loop_with(0.1, 0.2, 0.3)
    loop._compute_due()
    assert computed == []
    monkeypatch.setattr("services.grammar.process._TURN_S", 1e-9)
    loop._compute_due()
    assert computed == [0]
    assert [one.key[0] for one in loop._due] == [2, 1]


def test_those_that_have_left_their_slot_are_dropped() -> None:
    loop, computed = loop_with(0.1, 0.2)
    loop._followed.clear()
    loop._followed[0, 1] = _Followed((0, 1), cast(Any, None), 0)  # the slot's next sequence
    loop._compute_due()
    assert computed == []
    assert loop._due == []
