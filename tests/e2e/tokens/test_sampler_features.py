"""Every feature of the sampler through real clusters, alone and in random combinations, in mixed batches.

Each request is asked at both APIs beside all the others, and judged by transformers in float64: every
token, logprob, text and ending. The same requests say the same, to the bit, wherever and beside whomever
they run; and a judge that is wrong in any one thing finds wrong tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import Cluster, assert_all_free, baton_up
from tests.e2e.tokens.sampled_answers import Answer
from tests.e2e.tokens.sampled_asks import EVERY, EXTREMES, Ask, features_of, random_ask
from tests.e2e.tokens.sampled_proof import Figures, Judge, ask_alone, ask_both_apis
from tests.support.checkpoints import FAMILIES, MIXTURES, VOCAB_SIZE, Case
from tests.support.sampling.naive_sampler import naive_edited
from tests.support.sampling.perturbed_samplers import PERTURBED
from tests.support.sampling.sampler_truth import Output, logprob_error, wrong_tokens

AT_ONCE = 24
COUNTS = (
    "prompts_run", "tokens_decoded", "decode_steps", "handoffs_committed", "bytes_shipped", "bytes_received"
)  # fmt: skip
EXACT = ("--dtype", "float64", "--numerics", "exact")
PAIR = ("--block-tokens", "7", "--chunk-tokens", "17")
WORKERS = {
    "1+1": PAIR,
    "2+2": ("--prefill", "2", "--decode", "2", "--block-tokens", "16", "--chunk-tokens", "64"),
    "both": ("--both", "1", "--block-tokens", "5", "--chunk-tokens", "13"),
}
# Handoffs over links and within a worker, side by side.
OTHERS = ("--prefill", "1", "--decode", "1", "--both", "1", "--block-tokens", "5", "--chunk-tokens", "64")


@dataclass(frozen=True)
class Known:
    """Requests, what the pair of workers answered, and the logits behind it."""

    asks: list[Ask]
    answers: list[Answer]
    outputs: list[list[Output]]
    reports: dict[str, IntegrityReport]


def make_asks(seed: str, combinations: int, longest: int) -> list[Ask]:
    """Every feature by itself, its edges, those that a wrong sampler needs to show, random combinations."""
    rng = random.Random(seed)
    alone = [random_ask(rng, frozenset([feature]), longest) for feature in EVERY]
    own = {"seed": rng.getrandbits(64), "max_tokens": 12, "ignore_eos": True}
    edges = [Ask(tuple(rng.choices(range(VOCAB_SIZE), k=20)), {**own, **fields}) for fields in EXTREMES]
    needed = [
        random_ask(random.Random(f"{name} {number}"), features, longest)
        for name, (features, _) in PERTURBED.items()
        if len(features) > 1
        for number in range(4)
    ]
    return alone + edges + needed + [random_ask(rng, features_of(rng), longest) for _ in range(combinations)]


def answered(
    cluster: Cluster, judge: Judge, asks: Sequence[Ask]
) -> tuple[list[Answer], dict[str, IntegrityReport]]:
    """All asked side by side, in an order that mixes them; what workers then hold is nothing. With the
    answers comes what each worker did for them: its COUNTS."""

    async def run() -> tuple[list[Answer], dict[str, IntegrityReport]]:
        order = random.Random(2).sample(range(len(asks)), len(asks))
        await assert_all_free(cluster, within_s=5)
        before = await cluster.reports()
        mixed = await ask_both_apis(cluster, judge.texts, [asks[number] for number in order], AT_ONCE)
        await assert_all_free(cluster, within_s=5)
        answers = dict(zip(order, mixed, strict=True))
        after = await cluster.reports()
        # One that was not ready at first had done nothing.
        done = {name: grown(before.get(name, IntegrityReport()), report) for name, report in after.items()}
        return [answers[number] for number in range(len(asks))], done

    return asyncio.run(run())


def grown(before: IntegrityReport, after: IntegrityReport) -> IntegrityReport:
    return IntegrityReport(**{count: getattr(after, count) - getattr(before, count) for count in COUNTS})


@pytest.fixture(scope="module")
def judge(model: Path) -> Judge:
    return Judge(model)


@pytest.fixture(scope="module")
def known(cluster: Cluster, judge: Judge) -> Known:
    asks = make_asks("pair", combinations=8, longest=40)
    answers, reports = answered(cluster, judge, asks)
    outputs = [judge.outputs(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
    return Known(asks, answers, outputs, reports)


def test_each_and_combined_equal_the_reference_after_a_handoff(known: Known, judge: Judge) -> None:
    figures = Figures()
    for ask, answer, outputs in zip(known.asks, known.answers, known.outputs, strict=True):
        judge.judge(ask, answer, outputs, figures)
    assert set(figures.finishes) == {"stop", "length"}
    check_that_it_took_effect(known.reports, figures)
    prefill, decode = known.reports["prefill-0"], known.reports["decode-0"]
    assert prefill.tokens_decoded == decode.prompts_run == 0
    assert prefill.bytes_shipped >= decode.bytes_received > 0


def check_that_it_took_effect(reports: dict[str, IntegrityReport], figures: Figures) -> None:
    """Most tokens came from decode, and steps had rows of several requests."""
    decoded = sum(report.tokens_decoded for report in reports.values())
    assert decoded > 0.9 * 2 * (figures.tokens - figures.choices)
    assert decoded > 1.5 * sum(report.decode_steps for report in reports.values())
    assert sum(report.handoffs_committed for report in reports.values()) > figures.choices


@pytest.mark.slow
def test_one_after_the_other_they_say_the_same(known: Known, cluster: Cluster) -> None:
    alone = asyncio.run(ask_alone(cluster, known.asks[: len(EVERY)]))
    assert alone == known.answers[: len(EVERY)]


@pytest.mark.slow
def test_other_workers_say_the_same(known: Known, model: Path, judge: Judge) -> None:
    with baton_up(model, *EXACT, *OTHERS) as cluster:
        answers, reports = answered(cluster, judge, known.asks)
    assert all(report.prompts_run or report.tokens_decoded for report in reports.values()), "an idle worker"
    for ask, mine, its in zip(known.asks, answers, known.answers, strict=True):
        assert mine == its, ask


@pytest.mark.slow
def test_prompt_logprobs_of_every_length(cluster: Cluster, judge: Judge) -> None:
    """Around blocks, chunks and the 256 that a worker sends at a time; with an output and without."""
    rng = random.Random(4)
    asks = [
        Ask(
            prompt=tuple(rng.choices(range(VOCAB_SIZE), k=length)),
            fields={"max_tokens": count, "echo": True, "logprobs": length % 4, "temperature": 0.7, "seed": 1},
        )
        for length in (1, 2, 7, 8, 17, 18, 256, 257, 258, 520)
        for count in (0, 6)
    ]
    answers, _ = answered(cluster, judge, asks)
    figures = Figures()
    for ask, answer in zip(asks, answers, strict=True):
        judge.judge(ask, answer, judge.outputs(ask, answer), figures)
    assert figures.prompt_logprobs == sum(len(ask.prompt) - 1 for ask in asks)


@pytest.mark.parametrize("name", PERTURBED)
def test_a_sampler_that_is_wrong_in_one_thing_is_noticed(known: Known, name: str) -> None:
    needed, wrong = PERTURBED[name]
    outputs = [
        output
        for ask, outputs in zip(known.asks, known.outputs, strict=True)
        for output in outputs
        if needed <= ask.features
    ]
    assert any(wrong_tokens(output, wrong) for output in outputs)


def test_logprobs_of_other_logits_are_noticed(known: Known) -> None:
    """Logprobs of edited or scaled logits, of another token, or with one alternative less do not pass."""
    noticed = dict.fromkeys(("edited", "scaled", "another token", "fewer"), 0)
    for ask, answer, outputs in zip(known.asks, known.answers, known.outputs, strict=True):
        if ask.logprobs is None or not {"logit_bias", "temperature"} <= ask.features:
            continue
        for reported, output in zip(answer.choices, outputs, strict=True):
            for number, (token, logprobs) in enumerate(zip(reported.tokens, reported.logprobs, strict=True)):
                row, before = output.raw[len(output.prompt) - 1 + number], output.tokens[:number]
                edited = naive_edited(row, output.params, output.limits, output.prompt, before)
                scaled = [logit / output.params.temperature for logit in row]
                count = ask.logprobs
                for name, error in (
                    ("edited", logprob_error(edited, token, count, logprobs)),
                    ("scaled", logprob_error(scaled, token, count, logprobs)),
                    ("another token", logprob_error(row, token - 1, count, logprobs)),
                    ("fewer", logprob_error(row, token, count - 1, logprobs) if count else 2),
                ):
                    assert error > 1, name
                    noticed[name] += 1
    assert all(noticed.values())


def test_other_endings_and_seeds_are_noticed(known: Known, judge: Judge) -> None:
    """Without what ended it an output would have gone on; and choices have seeds of their own."""
    stopped = several = 0
    for ask, answer, outputs in zip(known.asks, known.answers, known.outputs, strict=True):
        for reported, output in zip(answer.choices, outputs, strict=True):
            if reported.finish == "stop":
                unstopped = dataclasses.replace(ask.ends, stops=(), stop_ids=(), max_tokens=1000)
                assert judge.texts.ended(reported.tokens, unstopped) is None
                stopped += 1
            if output.params.seed != outputs[0].params.seed and output.params.temperature > 0:
                same = dataclasses.replace(output, params=outputs[0].params)
                several += bool(wrong_tokens(same))
    assert stopped > 5
    assert several > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "workers"),
    [(FAMILIES[0], "1+1"), (FAMILIES[7], "2+2"), (FAMILIES[8], "both"), (MIXTURES[2], "1+1")],
    ids=str,
)
def test_hundreds_of_combinations(
    case: Case, workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = Judge(case.make(tmp_path, seed=5))
    asks = make_asks(workers, combinations=220, longest=96)
    with baton_up(tmp_path, *EXACT, *WORKERS[workers]) as cluster:
        answers, reports = answered(cluster, judge, asks)
    figures = Figures()
    for ask, answer in zip(asks, answers, strict=True):
        judge.judge(ask, answer, judge.outputs(ask, answer), figures)
    check_that_it_took_effect(reports, figures)
    with capsys.disabled():
        print(f"\n{case} {workers}: {len(asks)} requests, {figures}")
