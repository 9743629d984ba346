"""Which masks are computed together, and in which order."""

from __future__ import annotations

import math
from typing import Any, cast

from services.masks.process import _MASK_THREADS, _MASKS_A_THREAD, MaskLoop, _Followed

SLOW, CHEAP = 0.02, 0.0001


def loop_with(*costs_s: float) -> MaskLoop:
    """A loop with a due mask for each of these costs, in slots 0, 1, 2 and so on."""
    nothing = cast(Any, None)
    loop = MaskLoop(nothing, nothing, nothing, nothing)
    for slot, cost_s in enumerate(costs_s):
        one = _Followed((slot, 1), nothing, 0, cost_s)
        loop._followed[one.key] = one
        loop._due.append(one)
    return loop


def groups(loop: MaskLoop) -> list[list[int]]:
    found = []
    while group := loop._next_group():
        found.append([one.key[0] for one in group])
    return found


def test_cheap_ones_together_then_slow_ones_alone() -> None:
    assert groups(loop_with(SLOW, CHEAP, 2 * CHEAP, math.inf, CHEAP / 2)) == [[4, 1, 2], [0], [3]]


def test_a_cheap_one_that_comes_later_is_before_slow_ones() -> None:
    loop = loop_with(SLOW, SLOW, CHEAP)
    cheap = loop._due.pop()
    assert [one.key[0] for one in loop._next_group()] == [0]
    loop._due.append(cheap)
    assert groups(loop) == [[2], [1]]


def test_groups_are_bounded() -> None:
    most = _MASK_THREADS * _MASKS_A_THREAD
    assert [len(group) for group in groups(loop_with(*[CHEAP] * (2 * most + 1)))] == [most, most, 1]


def test_those_that_have_left_their_slot_are_dropped() -> None:
    loop = loop_with(CHEAP, SLOW)
    loop._followed.clear()
    loop._followed[0, 1] = _Followed((0, 1), cast(Any, None), 0)  # the slot's next sequence
    assert groups(loop) == []
    assert loop._due == []
