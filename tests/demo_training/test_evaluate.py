"""Marks: who answers is the caller's choice, and what was wrong is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from baton.client import AsyncClient, Choice, Completion, FinishReason, Message, Trace, Usage
from models.demo_training.evaluate import DEMO_MODEL, ThroughCluster, Transformers, mark, report
from models.demo_training.exam import questions


def test_marks_and_what_was_wrong() -> None:
    known = {turn.question: turn.answer for part in ("copy", "small talk") for turn in questions(part, 10)}
    spoilt = questions("copy", 10)[3].question

    def answer(asked: Sequence[str]) -> list[str]:
        return ["no" if question == spoilt else known[question] for question in asked]

    found = report(mark(answer, ("copy", "small talk"), 10))
    assert found["scores"] == {"copy": {"right": 9, "of": 10}, "small talk": {"right": 10, "of": 10}}
    assert [wrong["answer"] for wrong in found["wrong"]["copy"]] == ["no"]
    assert len(found["samples"]) == 10
    json.dumps(found)


class Answering:
    """A client whose cluster needs five steps for an answer, less the drafts of a prediction."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def __aenter__(self) -> Answering:
        return self

    async def __aexit__(self, *exception: object) -> None:
        return None

    async def complete(self, messages: Sequence[Message], **fields: Any) -> Completion:
        self.asked.append({"question": messages[0].content, **fields})
        accepted = 10 if "prediction" in fields else 0
        trace = Trace(
            "p", "d", 1, 0, 0, {}, 0.0, decode_steps=5, draft_tokens=14, accepted_draft_tokens=accepted
        )
        choice = Choice(0, (1,), messages[0].content.upper(), FinishReason.STOP, trace=trace)
        return Completion((choice,), Usage(1, 1))


def test_a_cluster_is_asked_with_predictions_and_says_its_tokens_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Answering()

    async def connect(address: str) -> Answering:
        return client

    monkeypatch.setattr(AsyncClient, "connect", connect)
    through = ThroughCluster("nowhere:1", predictions={"b": "the answer"})
    assert through.take_tokens_per_step() is None
    assert through(["a"]) == ["A"]
    assert through.take_tokens_per_step() == 1
    assert through(["a", "b"]) == ["A", "B"]
    assert through.take_tokens_per_step() == 2
    assert through.take_tokens_per_step() is None
    predictions = [one.get("prediction") for one in sorted(client.asked, key=lambda one: one["question"])]
    assert predictions == [None, None, "the answer"]


def test_the_shipped_model_answers_through_transformers() -> None:
    """Prompts of different lengths in one batch; `tests/e2e/tokens/test_demo_model.py` asks more."""
    answerer = Transformers(DEMO_MODEL, "float32", "cpu")
    assert mark(answerer, ("small talk",), 4)["small talk"].right == 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shipped_model_reaches_its_scores(dtype: str) -> None:
    """The scores are those of its card, on fewer questions: a tenth of a percent cannot be determined from so
    few."""
    answerer = Transformers(DEMO_MODEL, dtype, "cpu")
    least = {
        "retrieve-1000": (100, 98), "retrieve-3000": (40, 95), "copy": (200, 98), "arithmetic": (200, 95),
        "json": (200, 99), "small talk": (200, 98), "beyond me": (200, 98),
    }  # fmt: skip
    for part, (count, percent) in least.items():
        assert mark(answerer, (part,), count)[part].percent >= percent, part
