"""Tests and parametrisations of which `make test` runs a part; the other cases are marked `slow`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


# Of a test that compares a rule's effect with what happens without the rule: the latter, which shows that the
# test can fail, in `make prove` alone. Its argument is `ablated`.
WITHOUT_THE_RULE = pytest.mark.parametrize(
    "ablated", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rule", "ablated"]
)


def one_in(count: int, cases: Sequence[object]) -> list[object]:
    """All cases; of each `count` the first is not slow."""
    return [
        case if number % count == 0 else pytest.param(*_values(case), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def each_value_once(*values: Sequence[object]) -> list[ParameterSet]:
    """All combinations of the parameters' values; not slow are as many as the longest has values, in which
    each value of each parameter comes up."""
    most = max(map(len, values))
    kept = {tuple(number % len(each) for each in values) for number in range(most)}
    return [
        pytest.param(*(each[place] for each, place in zip(values, places, strict=True)))
        if places in kept
        else pytest.param(
            *(each[place] for each, place in zip(values, places, strict=True)), marks=pytest.mark.slow
        )
        for places in itertools.product(*(range(len(each)) for each in values))
    ]


def _values(case: object) -> tuple[object, ...]:
    return case if type(case) is tuple else (case,)
