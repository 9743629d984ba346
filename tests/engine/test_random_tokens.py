"""Steps of a start run with tokens that differ from row to row."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.plan.prefill_step import PrefillStep
from baton.engine.random_tokens import random_tokens
from tests.engine.graph_twins import GraphTwins
from tests.engine.local_engine import CONFIG, LocalEngine
from tests.engine.prompt_passes import SMALL_SPLIT, SMALL_TUNING

VOCAB = int(CONFIG["vocab_size"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_tokens_are_of_the_vocabulary_and_the_same_at_every_start() -> None:
    tokens = random_tokens(VOCAB, 1000)
    assert tokens == random_tokens(VOCAB, 1000)
    assert set(tokens) == set(range(VOCAB))


def test_decode_steps_without_a_sequence_have_tokens_that_differ(tmp_path: Path) -> None:
    """The tokens differ at a start, and in the rows that a step pads."""
    engine = LocalEngine(tmp_path / "model", slots=8, device=DEVICE, graph=True)
    loop = cast(GraphDecodeLoop, engine.decode)
    rows = loop.step_state.pass_.inputs.token
    assert rows.tolist() == random_tokens(VOCAB, 8), "those that were captured and timed"
    key = engine.start([5, 6, 7], max_tokens=2)
    engine.run(key)
    assert rows[1:].tolist() == random_tokens(VOCAB, 8)[1:]
    assert rows[0] == engine.output[key][0]


def test_prefill_steps_of_a_start_have_tokens_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GraphTwins(
        tmp_path, "llama", lengths=(40,), most_rows=64, block_tokens=4, tuning=SMALL_TUNING,
        split=SMALL_SPLIT, layers=1, device=DEVICE,
    ).eager  # fmt: skip
    ran: list[PrefillStep] = []
    forward = made.forward

    def recorded(step: PrefillStep, joined: JoinedRows | None = None) -> Tensor:
        ran.append(step)
        return forward(step, joined)

    monkeypatch.setattr(made, "forward", recorded)
    made.measure_step_times()
    assert {step.rows for step in ran} == {64}
    (chunk,) = ran[0].chunks
    assert len(set(chunk.token_ids)) > 16
