"""A mixture of experts through the engine's steps: prompts in chunks beside others, sampling, a sequence that
goes on elsewhere, and the kernels of a decode step."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.plan.step_plan import Chunk, DecodeRows, StepPlan
from baton.engine.sequence import SamplingParams
from tests.engine.executor.test_executor import queued, until_ended
from tests.engine.local_engine import LocalEngine
from tests.support.checkpoints import MIXTURES
from tests.support.reference import greedy_matches, load_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Eight experts of which a token takes two, with dense layers between.
CASE = MIXTURES[3]
PROMPTS = [list(range(5, 5 + n)) for n in (1, 17, 40)]
DRAWN = SamplingParams(0.9, seed=2**63 + 11)
FILTERED = SamplingParams(0.9, 20, 0.95, seed=7, logprobs=2)


def taken_in_all(engine: LocalEngine) -> list[int]:
    """Rows that each mixture's experts have been taken by, together."""
    mixtures = [each.mlp for each in engine.model.layers if isinstance(each.mlp, ExpertsMlp)]
    return [int(mixture.taken.sum()) for mixture in mixtures]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASE.make(tmp_path_factory.mktemp("mixture"))


def test_tokens_are_those_of_transformers_beside_others_and_after_a_move(folder: Path) -> None:
    engine = LocalEngine(folder, checkpoint=True, chunk=7, slots=9, blocks=160)
    together = engine.run(*(engine.start(prompt, max_tokens=10) for prompt in PROMPTS))
    reference = load_reference(folder, torch.float32)
    for prompt, output in zip(PROMPTS, together, strict=True):
        greedy_matches(reference, prompt, output)
    for sampling in (SamplingParams(), DRAWN, FILTERED):
        alone = LocalEngine(folder, checkpoint=True, chunk=64, block_tokens=16)
        whole = alone.start(PROMPTS[1], max_tokens=8, sampling=sampling)
        (expected,) = alone.run(whole)
        beside = engine.start(PROMPTS[2], max_tokens=30)
        moved = engine.start(PROMPTS[1], max_tokens=8, sampling=sampling, emitted=tuple(expected[:3]))
        engine.run(moved, beside)
        assert engine.output[moved] == expected[3:]
        assert engine.logprobs[moved] == alone.logprobs[whole][3:]


def test_a_step_by_kernels_draws_the_same_tokens(folder: Path) -> None:
    """Three rows of a graph of four, whose fourth takes no expert; then a graph of one row."""
    expected = LocalEngine(folder, checkpoint=True, device=DEVICE)
    engine = LocalEngine(folder, checkpoint=True, device=DEVICE, graph=True)
    before = taken_in_all(engine)  # by the steps that a start on a GPU measures
    asks = list(zip(PROMPTS, (SamplingParams(), DRAWN, FILTERED), (3, 3, 5), strict=True))
    wanted, found = (
        each.run(*(each.start(prompt, max_tokens=count, sampling=how) for prompt, how, count in asks))
        for each in (expected, engine)
    )
    assert found == wanted
    counts = [after - one for after, one in zip(taken_in_all(engine), before, strict=True)]
    rows = sum(len(prompt) for prompt in PROMPTS) + sum(len(output) - 1 for output in found)
    assert counts == [2 * rows] * 2, "of prompts by the reference, and of decode steps by kernels"


def test_steps_without_sequences_take_experts_only_while_they_are_measured(folder: Path) -> None:
    """Each row those of its own token; a sequence that is decoded later leaves the other rows without."""
    engine = LocalEngine(folder, checkpoint=True, device=DEVICE, graph=True)
    loop = cast(GraphDecodeLoop, engine.decode)
    step = loop.step_state.pass_
    experts = step.workspace.experts
    assert experts is not None
    graph = loop.graphs[4].simple
    with step.all_rows_present():
        graph()
        loop.queue.drain()
        taken = experts.ids[:4].tolist()
    assert all(len(set(row)) == 2 and min(row) >= 0 for row in taken)
    assert len({tuple(row) for row in taken}) > 1
    graph()
    loop.queue.drain()
    assert experts.ids[:4].tolist() == [[-1, -1]] * 4
    before = taken_in_all(engine)
    engine.run(engine.start(PROMPTS[0], max_tokens=2))
    counts = [after - one for after, one in zip(taken_in_all(engine), before, strict=True)]
    assert counts == [2 * (len(PROMPTS[0]) + 1)] * 2


def test_a_decode_step_joins_a_prompt(folder: Path) -> None:
    """Padding of the prompt lies between its rows and those of the step, one of which is of no slot."""
    engine = LocalEngine(folder, checkpoint=True, device=DEVICE, graph=True, mixed="eager", slots=2)
    key = engine.start(PROMPTS[1], max_tokens=2)
    prompt = queued(engine, tuple(PROMPTS[1][:9]))
    results = until_ended(engine, engine.executor.launch(StepPlan((Chunk(prompt, 0, 9),), DecodeRows(2))))
    plain = LocalEngine(folder, checkpoint=True, device=DEVICE)
    running, joining = (plain.start(ids, max_tokens=2) for ids in (PROMPTS[1], PROMPTS[1][:9]))
    assert [engine.output[key], [result.token for result in results]] == [
        plain.run(running)[0],
        plain.run(joining)[0][:1],
    ]
