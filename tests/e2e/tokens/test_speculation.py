"""A cluster whose decode worker verifies drafts answers as one without, and says how many it accepted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.v1.types_pb2 import Grammar
from tests.e2e.conftest import CUT
from tests.e2e.support.cluster import Answer, Cluster, assert_all_free, baton_up

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 3
TOKENS = 48
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0.9, "seed": 1, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "filters": {"temperature": 1.1, "seed": 2, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 2},
    "guided": {"temperature": 0.9, "seed": 3, "grammar": Grammar(regex="(ab|c){400}")},
    "without drafts": {"temperature": 0.7, "seed": 4, "max_draft_tokens": 0},
}


async def test_drafts_behind_a_handoff_change_no_token(cluster: Cluster, unlike: Cluster) -> None:
    plain = await answers_of(cluster, dict.fromkeys(ASKED, ""))
    predicted = await answers_of(unlike, {name: one.text for name, one in plain.items()})
    async with unlike.stub() as stub:
        stop = plain["greedy"].text[20:23]
        stopped = await unlike.generate(
            stub, PROMPT, max_tokens=TOKENS, ignore_eos=True, temperature=0, stop=[stop]
        )
    (decode,) = [report for name, report in (await unlike.reports()).items() if name == "decode-0"]
    assert decode.speculative_steps > 0
    assert stopped.text == plain["greedy"].text.partition(stop)[0]
    assert stopped.last is not None
    counted = stopped.last.trace.drafts
    assert counted.steps + counted.accepted >= len(stopped.token_ids) - 1 > 0
    for name, answer in predicted.items():
        assert answer.token_ids == plain[name].token_ids, name
        assert answer.last is not None
        usage, drafts = answer.last.usage, answer.last.trace.drafts
        if name in ("guided", "without drafts"):
            assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (0, 0), name
            assert (drafts.steps, drafts.drafts) == (TOKENS - 1, 0), (name, answer.last.trace)
        else:
            assert usage.accepted_prediction_tokens == drafts.accepted_predicted > 0, name
            assert drafts.steps + drafts.accepted == TOKENS - 1, name
        assert plain[name].last.trace.drafts.steps == TOKENS - 1  # type: ignore[union-attr]


@pytest.mark.slow
async def test_a_policy_changes_no_token(cluster: Cluster, model: Path) -> None:
    """And tries drafts before it knows whether they are worth their rows. What was verified is in the
    metrics, and tokens a step in the status."""
    plain = await answers_of(cluster, dict.fromkeys(ASKED, ""))
    flags = ("--dtype", "float64", "--numerics", "exact", *CUT, "--speculation", "auto")
    with baton_up(model, *flags) as adaptive:
        answers = await answers_of(adaptive, {name: one.text for name, one in plain.items()})
        (decode,) = [report for name, report in (await adaptive.reports()).items() if name == "decode-0"]
    assert [answers[name].token_ids for name in ASKED] == [plain[name].token_ids for name in ASKED]
    assert decode.speculative_steps > 0
    counted = [answer.last.trace.drafts for answer in answers.values() if answer.last is not None]
    assert sum(sum(drafts.rows) for drafts in decode.drafts) == sum(one.drafts for one in counted) > 0
    assert sum(sum(drafts.accepted) for drafts in decode.drafts) == sum(one.accepted for one in counted)
    assert decode.sequence_steps == sum(one.steps for one in counted)


async def answers_of(cluster: Cluster, predictions: dict[str, str]) -> dict[str, Answer]:
    """The answers to all requests, made at once; everything is free afterwards."""
    async with cluster.stub() as stub:
        answers = await asyncio.gather(
            *(
                cluster.generate(
                    stub,
                    PROMPT,
                    max_tokens=TOKENS,
                    ignore_eos="grammar" not in fields,
                    prediction=predictions[name],
                    **fields,
                )
                for name, fields in ASKED.items()
            )
        )
        await assert_all_free(cluster, 1.0)
    return dict(zip(ASKED, answers, strict=True))
