"""Costs of formats for the demo model's tasks: its greedy answers to the evaluation's questions, marked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tokenizers import Tokenizer

from models.demo_training.evaluate import DEMO_MODEL
from models.demo_training.exam import MAX_ANSWER_TOKENS, questions
from models.demo_training.tasks.turn import Turn
from tests.engine.model.test_demo_perplexity import (
    EXACT,
    FP8,
    MAKER,
    WEIGHTS,
    Variant,
    codes_of_activations,
    logits_of,
    passes_of,
)
from tests.engine.passes import Passes

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
VARIANTS = {"KV in fp8": Variant(cache=FP8)} | {name: variant for name, (variant, _) in WEIGHTS.items()}
# Of the longest conversation.
LENGTH = 3072 + MAX_ANSWER_TOKENS
# Questions of each part.
REDUCED = {"copy": 2, "json": 1}
FULL = {
    "retrieve-1000": 40,
    "retrieve-3000": 12,
    "copy": 70,
    "arithmetic": 70,
    "json": 70,
    "small talk": 35,
    "beyond me": 35,
}


@pytest.mark.parametrize(
    ("counts", "names"),
    [
        (REDUCED, ["fp8, W8A8, KV in fp8"]),
        pytest.param(FULL, list(VARIANTS), marks=[pytest.mark.slow, pytest.mark.timeout(14_400)]),
    ],
    ids=["reduced", "full"],
)
def test_tasks(counts: Mapping[str, int], names: list[str]) -> None:
    check_tasks(counts, names)


def check_tasks(counts: Mapping[str, int], names: list[str]) -> None:
    """Asserts that the marks are within 1 point of the unquantised model's, over all tasks."""
    asked = [turn for part, count in counts.items() for turn in questions(part, count)]
    exact = right(asked, EXACT)
    assert exact > 0.97 * len(asked)
    for name in names:
        found = right(asked, VARIANTS[name])
        print(f"\nPROOF right answers of {len(asked)}: {exact}, {name} {found}", end="", flush=True)
        assert 100 * (exact - found) <= len(asked), name


def right(asked: list[Turn], variant: Variant) -> int:
    """The number of questions that are answered rightly."""
    passes = passes_of(variant, LENGTH)
    return sum(is_right(turn, variant, passes) for turn in asked)


def is_right(turn: Turn, variant: Variant, passes: Passes) -> bool:
    """One pass shows whether the greedy answer is the expected one; another may be right as well."""
    prompt, answer = MAKER.prompt(turn.question), [*MAKER.encode(turn.answer), MAKER.end]
    logits = logits_of([*prompt, *answer], variant, passes)
    if logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer:
        return turn.right(turn.answer)
    return turn.right(
        TOKENIZER.decode(generated(prompt, int(logits[len(prompt) - 1].argmax()), variant, passes))
    )


def generated(prompt: list[int], first: int, variant: Variant, passes: Passes) -> list[int]:
    """The greedy answer from its first token on, behind a prompt that has run."""
    answer = [first]
    with codes_of_activations(variant.activations):
        while answer[-1] != MAKER.end and len(answer) < MAX_ANSWER_TOKENS:
            place = len(prompt) + len(answer) - 1
            answer.append(int(passes.run([(0, place, answer[-1:])])[0][0].argmax()))
    return answer[:-1] if answer[-1] == MAKER.end else answer
