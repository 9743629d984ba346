"""Greedy tokens of a float32 run against a float32 reference, where rounding may decide between two equals.

A token that differs from the reference's counts as wrong, unless the reference's two best logits differ by
less than 1e-4 of the standard deviation of that position's logits and it is the second of them: then it is a
tie, and what follows is judged after the reference's token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TIE = 1e-4
_AT_ONCE = 32


@dataclass(frozen=True)
class Ask:
    """`prompt`, and how many tokens come after it."""

    prompt: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Verdict:
    tokens: int
    ties: int
    wrong: tuple[str, ...]

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(self.tokens + other.tokens, self.ties + other.ties, self.wrong + other.wrong)


# Asks, and tokens that stand already after each one's prompt → each one's further tokens, up to its count.
Runner = Callable[[Sequence[Ask], Sequence[tuple[int, ...]]], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class _Difference:
    number: int
    expected: int
    is_tie: bool
    lead: float


def judge(model: Any, asks: Sequence[Ask], run: Runner) -> Verdict:
    """Runs all asks, and those with a tie again after the reference's token, until nothing is left."""
    ties, wrong = 0, []
    left: list[tuple[Ask, tuple[int, ...]]] = [(ask, ()) for ask in asks]
    while left:
        outputs = run([ask for ask, _ in left], [forced for _, forced in left])
        texts = [
            (ask.prompt, (*forced, *output)) for (ask, forced), output in zip(left, outputs, strict=True)
        ]
        assert [len(output) for _, output in texts] == [ask.count for ask, _ in left]
        again = []
        for (ask, forced), (_, output), found in zip(left, texts, _differences(model, texts), strict=True):
            if found is None:
                continue
            assert found.number >= len(forced), "a token that was forced has been judged already"
            if not found.is_tie:
                wrong.append(f"prompt of {len(ask.prompt)}, token {found.number}: lead {found.lead:.3g} std")
                continue
            ties += 1
            forced = (*output[: found.number], found.expected)
            if len(forced) < ask.count:
                again.append((ask, forced))
        left = again
    return Verdict(sum(ask.count for ask in asks), ties, tuple(wrong))


def _differences(
    model: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[_Difference | None]:
    """The first token of each output that the model would not choose. `texts`: prompts and outputs."""
    found: list[_Difference | None] = []
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        for logits, (prompt, output) in zip(_logits(model, some), some, strict=True):
            found.append(_difference(logits[len(prompt) - 1 : len(prompt) + len(output) - 1], output))
    return found


def _logits(model: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """[texts, longest, vocab]; what stands behind a text's own end must not be read."""
    ids = [[*prompt, *output] for prompt, output in texts]
    longest = max(map(len, ids))
    padded = torch.tensor([one + [0] * (longest - len(one)) for one in ids], device=model.device)
    with torch.inference_mode():
        logits: Tensor = model(padded).logits
    return logits


def _difference(logits: Tensor, output: Sequence[int]) -> _Difference | None:
    """logits [len(output), vocab], of the position before each token."""
    best = logits.double().topk(2)
    differs = best.indices[:, 0].cpu() != torch.tensor(list(output))
    if not bool(differs.any()):
        return None
    number = int(differs.nonzero()[0])
    lead = float((best.values[number, 0] - best.values[number, 1]) / logits[number].double().std())
    first, second = best.indices[number].tolist()
    return _Difference(number, first, lead < TIE and output[number] == second, lead)
