"""Requests for what no pair of workers offers are refused; a context is that of pairs that offer it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.base.errors import ErrorKind, FieldError
from baton.v1.types_pb2 import Choices, Grammar
from services.router.request import validate
from services.router.request.limits import PairLimits
from tests.router.request.checked import LIMITS, PARSED, check, parts_of

REGEX, PLAIN = frozenset({"regex"}), frozenset({"regex", "choice"})
# What pairs of workers offer, what a request asks for, the field and the words of its error: None where it
# passes.
OFFERED: list[tuple[list[PairLimits], dict[str, Any], tuple[str, str] | None]] = [
    ([PairLimits(9, 9, 5, REGEX), PairLimits(9, 9, 0, PLAIN)], {"logprobs": 5}, None),
    ([PairLimits(9, 9, 5, REGEX)], {"grammar": Grammar(regex="a")}, None),
    ([PairLimits(9, 9, 5, None)], {"grammar": Grammar(regex="a"), "logprobs": 5}, None),
    (
        [PairLimits(9, 9, 5, frozenset()), PairLimits(9, 9, 5, frozenset({"choice"}))],
        {"grammar": Grammar(regex="a"), "logprobs": 9},
        ("guide", "guide: the workers do not guide outputs by a regex"),
    ),
    ([PairLimits(9, 9, 0), PairLimits(9, 9, 0)], {"logprobs": 0}, ("top", "top: the workers report none")),
    ([PairLimits(9, 9, 4), PairLimits(9, 9, 5)], {"logprobs": 6}, ("top", "top: at most 5 are reported")),
    # Those count that guide its output.
    (
        [PairLimits(9, 9, 9, REGEX), PairLimits(9, 9, 5, PLAIN)],
        {"logprobs": 6, "grammar": Grammar(choice=Choices(choices=["a"]))},
        ("top", "top: at most 5 are reported"),
    ),
]


@pytest.mark.parametrize(("pairs", "fields", "error"), OFFERED)
def test_what_no_pair_of_workers_offers_is_refused(
    pairs: list[PairLimits], fields: dict[str, Any], error: tuple[str, str] | None
) -> None:
    parsed = replace(PARSED, **fields, api_names={"grammar": "guide", "logprobs": "top"})
    limits = replace(LIMITS, pairs=tuple(pairs))
    if error is None:
        validate.check_fields(parsed, limits)
        return
    with pytest.raises(FieldError) as caught:
        validate.check_fields(parsed, limits)
    assert parts_of(caught.value) == (*error, None, ErrorKind.INVALID)


def test_the_context_is_that_of_pairs_that_offer_what_is_asked_for() -> None:
    limits = replace(LIMITS, pairs=(PairLimits(90, 90, 0, PLAIN), PairLimits(9, 9, 5, REGEX)))
    prompt = [1] * 20
    for parsed in (PARSED, replace(PARSED, grammar=Grammar(choice=Choices(choices=["a"])))):
        validate.check_prompt(parsed, validate.check_fields(parsed, limits), prompt, limits)
    for grammar in (None, Grammar(regex="a")):
        parsed = replace(PARSED, grammar=grammar, logprobs=1)
        with pytest.raises(FieldError, match="context of 9 tokens"):
            validate.check_prompt(parsed, validate.check_fields(parsed, limits), prompt, limits)
    # Each of both has room for what the other one lacks.
    limits = replace(LIMITS, pairs=(PairLimits(90, 90, 9, REGEX), PairLimits(9, 9, 9, PLAIN)))
    parsed = replace(PARSED, grammar=Grammar(choice=Choices(choices=["a"])))
    with pytest.raises(FieldError, match="context of 9 tokens"):
        validate.check_prompt(parsed, validate.check_fields(parsed, limits), prompt, limits)


def test_workers_that_left_meanwhile_leave_no_context() -> None:
    """The limits are another snapshot once the prompt is tokenised."""
    fields = check(replace(PARSED, logprobs=1))
    gone = replace(LIMITS, pairs=(PairLimits(90, 90, 0),))
    for most in (16, 0):
        with pytest.raises(FieldError, match="context of 0 tokens"):
            validate.check_prompt(replace(PARSED, logprobs=1), replace(fields, max_tokens=most), [1], gone)
