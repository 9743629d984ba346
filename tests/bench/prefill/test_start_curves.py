"""Curves with token 0 and with random tokens, on a CPU with a tiny model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bench.decode.case import Case, EngineSize
from bench.decode.engine import DecodeEngine
from bench.decode.front import Front
from bench.precision import Precision
from bench.prefill import start_curves
from bench.prefill.start_curves import Curves, StartCurves, compare


def test_both_kinds_are_measured_in_turn_and_compared() -> None:
    kinds: list[bool] = []

    def measure(tokens: Sequence[int]) -> Curves:
        kinds.append(len(set(tokens)) > 1)
        return {"decode_ms": {8: 0.002 + 0.0001 * kinds[-1] + 0.0002 * (len(kinds) > 4)}}

    found = compare(measure, 100, 16, 3)
    assert kinds == [False, True] * 3
    assert found == {"decode_ms": {"8": [2.0, 2.1, 5.0], "spread_percent": 10.0}}


def test_rows_of_which_a_repeat_failed_are_left_out() -> None:
    repeats = iter([0.002, 0.001, 0.0, 0.001])

    def measure(tokens: Sequence[int]) -> Curves:
        return {"decode_ms": {8: next(repeats), 16: 0.004}, "product_ms": {64 if any(tokens) else 128: 0.1}}

    found = compare(measure, 100, 16, 2)
    assert found["decode_ms"] == {"16": [4.0, 4.0, 0.0], "spread_percent": 0.0}
    assert found["product_ms"] == {"spread_percent": 0.0}


@pytest.mark.slow
def test_the_curves_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_curves, "_STEPS", 1)
    case = Case("tiny", Precision("fp32"), 2, 8, "greedy", "exact")
    engine = DecodeEngine(case, EngineSize(2, 64), Front, device="cpu", interpreted=True)
    with torch.no_grad():
        found = compare(StartCurves(engine, 64).measure, engine.decoder.config.vocab_size, 64, 1)
    assert engine.loop.tokens_decoded == 0
    engine.close()
    assert "spread_percent" in found["decode_ms"]  # a busy machine may leave out the rest
    assert set(found["prefill_ms"]) == {"64", "spread_percent"}
    assert found["prefill_ms"]["64"][1] > 0
