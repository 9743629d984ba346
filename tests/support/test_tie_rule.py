from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.tie_rule import Ask, Verdict, judge

VOCAB = 11


class Model:
    """The token after t is t + 1; at each multiple of 5, t + 2 has all but as large a logit (by `lead`)."""

    device = torch.device("cpu")

    def __init__(self, lead: float) -> None:
        self.lead = lead

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        logits = torch.nn.functional.one_hot((ids + 1) % VOCAB, VOCAB).double()
        second = torch.nn.functional.one_hot((ids + 2) % VOCAB, VOCAB).double() * (1 - self.lead)
        return SimpleNamespace(logits=logits + second * (ids % 5 == 0)[..., None])


def careless(asks: Sequence[Ask], forced: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Takes the second where two are all but equal."""
    outputs = []
    for ask, before in zip(asks, forced, strict=True):
        ids = [*ask.prompt, *before]
        while len(ids) < len(ask.prompt) + ask.count:
            ids.append((ids[-1] + (2 if ids[-1] % 5 == 0 else 1)) % VOCAB)
        outputs.append(ids[len(ask.prompt) + len(before) :])
    return outputs


@pytest.mark.parametrize(("lead", "ties", "wrong"), [(1e-5, 3, 0), (1e-2, 0, 1)])
def test_a_tie_is_counted_and_what_follows_is_judged_after_the_references_token(
    lead: float, ties: int, wrong: int
) -> None:
    verdict = judge(Model(lead), [Ask((3,), 9), Ask((1,), 3)], careless)
    assert (verdict.tokens, verdict.ties, len(verdict.wrong)) == (12, ties, wrong)
    assert judge(Model(lead), [Ask((1, 2, 6), 3)], careless) == Verdict(3, 0, ())


def wrong_behind_a_tie(asks: Sequence[Ask], forced: Sequence[tuple[int, ...]]) -> list[list[int]]:
    outputs = careless(asks, forced)
    return [
        [9 if token == 7 and before else token for token in output]
        for output, before in zip(outputs, forced, strict=True)
    ]


def test_a_wrong_token_at_or_behind_a_tie_is_found() -> None:
    def wrong_at_7(asks: Sequence[Ask], forced: Sequence[tuple[int, ...]]) -> list[list[int]]:
        return [[8 if token == 7 else token for token in output] for output in careless(asks, forced)]

    verdict = judge(Model(1e-5), [Ask((3,), 4)], wrong_at_7)
    assert (verdict.ties, len(verdict.wrong)) == (0, 1), "7 was the second of two equals, 8 is neither"
    verdict = judge(Model(1e-5), [Ask((2,), 5)], wrong_behind_a_tie)
    assert verdict.ties == 1
    assert len(verdict.wrong) == 1
    assert "token 4" in verdict.wrong[0]
