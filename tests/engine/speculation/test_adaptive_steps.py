"""Steps of the reference engine whose rows a policy chooses: the same tokens, and drafts where they pay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.engine.speculation.size_times import StepSize
from baton.perf_model.curve import Curve
from baton.perf_model.step_costs import StepCosts
from tests.engine.local_engine import LocalEngine

PROMPT, TOKENS = [5, 6, 7, 8] * 4, 60


def run(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, *, row_s: float) -> list[int]:
    """Runs a prompt, by a policy that takes steps to last 1 ms and `row_s` for each row."""
    loop = engine.decode
    kinds = [(rows, False) for rows in loop.steps.batches] + [
        (rows, True) for rows in loop.steps.draft_batches
    ]
    sizes = [StepSize(rows, 1, drafts) for rows, drafts in kinds]
    loop.size_times.measured({size: 0.001 + row_s * size.rows for size in sizes})
    monkeypatch.setattr(loop.size_times, "observe", lambda size, seconds: None)
    key = engine.start(PROMPT, max_tokens=TOKENS)
    engine.run(key)
    return engine.output[key]


def test_a_slot_has_as_many_drafts_as_the_policy_gives_it(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "model", rows_per_slot=4, lookup_tokens=64, adaptive=True)
    loop, policy = engine.decode, engine.decode.steps.policy
    assert policy is not None
    assert engine.state.drafts is not None
    for budgets in ([0, 3, 3, 3], [2, 3, 3, 3]):
        policy.budgets = np.array(budgets)
        policy.choose = lambda sequences, plain_rows: 8  # type: ignore[method-assign]
        key = engine.start(PROMPT, max_tokens=20)
        engine.run(key)
        engine.slots.release(*key)
        progress = loop.progress.progress(*key)
        assert engine.state.drafts.most.tolist() == budgets
        assert progress.drafts <= budgets[key[0]] * progress.steps
        assert (progress.drafts > 0) is (budgets[key[0]] > 0)


@pytest.mark.parametrize("row_s", [1e-6, 1.0])
def test_the_policy_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_s: float) -> None:
    plain = LocalEngine(tmp_path / "model")
    key = plain.start(PROMPT, max_tokens=TOKENS)
    plain.run(key)
    engine = LocalEngine(tmp_path / "model", rows_per_slot=4, lookup_tokens=64, adaptive=True, blocks=64)
    assert run(engine, monkeypatch, row_s=row_s) == plain.output[key]
    if row_s == 1.0:
        assert engine.executor.speculative_steps == 0, "rows are too dear, and probing comes later"
    else:
        assert engine.executor.speculative_steps > 0


def test_costs_are_reported_by_sequences_where_a_policy_chooses_rows(tmp_path: Path) -> None:
    """One sequence has four rows of a step, four have a row each."""
    by_rows = StepCosts(decode_step_s=0.004, decode_curve=Curve((1.0, 16.0), (0.0, 0.015)))
    engines = [
        LocalEngine(tmp_path / "model", slots=6, rows_per_slot=4, lookup_tokens=64, adaptive=adaptive)
        for adaptive in (True, False)
    ]
    for engine in engines:
        loop = engine.decode
        assert loop.draft_rates is not None
        loop.size_times.measured({StepSize(8, 4, True): 0.012, StepSize(4, 4, False): 0.004})
        loop.draft_rates.tokens_a_step = 2.0
    costs = engines[0].decode.reported_costs(by_rows, 10)
    assert costs.decode_curve.at == (1, 2, 4, 6)
    assert (costs.rows_a_sequence, costs.tokens_a_step) == (1.0, 2.0)
    assert costs.token_s(4, 0) == pytest.approx(by_rows.decode_s(4, 0)), "without drafts"
    assert engines[0].decode.reported_costs(by_rows, 10) == costs
    plain = engines[1].decode.reported_costs(by_rows, 10)
    assert plain.decode_curve == by_rows.decode_curve
    assert (plain.rows_a_sequence, plain.tokens_a_step) == (1.0, 2.0)
    bare = LocalEngine(tmp_path / "model").decode
    assert bare.reported_costs(by_rows, 10) == by_rows
