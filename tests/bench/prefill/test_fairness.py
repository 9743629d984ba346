"""`bench.prefill --fairness` on a CPU with a tiny model: every load of it, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.prefill.__main__ import _parser
from bench.prefill.fairness import by_depth, errors, run_fairness
from bench.prefill.traffic import Load, Step

TINY = ("--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--json", "--fairness")


def test_the_command_tells_of_every_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = _parser().parse_args(
        [
            *TINY,
            "--short",
            "20",
            "--long",
            "600",
            "--count",
            "12",
            "--step-ms",
            "25,8",
            "--chunk-tokens",
            "64",
        ]
    )
    run_fairness(told, tmp_path)
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["step_ms"], second["step_ms"]) == (25.0, 8.0)
    assert first["alone_p99_ms"] == second["alone_p99_ms"] > 0
    for found in (first, second):
        assert found["counted"] >= 12
        assert found["unserved"] <= found["counted"] - 12
        assert found["long_ms"]
        assert found["ratio_p99"] == pytest.approx(found["beside_p99_ms"] / found["alone_p99_ms"], abs=0.01)
        assert sum(part["steps"] for part in found["by_depth"]) >= 600 // 64


def test_arrivals_are_poisson_and_the_same_again() -> None:
    load = Load(500, 4000, rate=25.0, seed=3)
    times = list(load.arrivals())
    assert times == list(load.arrivals())
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 25, rel=0.05)
    assert list(Load(500, 9, users=3).arrivals()) == [0.0] * 3


def test_errors_are_of_what_was_measured() -> None:
    steps = [Step(((0, 10),), 0.01, 0.02), Step(((90, 5), (0, 3)), 0.03, 0.02), Step(((0, 1),), 0.0, 0.02)]
    assert errors(steps) == {"step_error_p50": 50.0, "step_error_p99": 50.0, "step_error_mean": 0.0}
    shallow, deep = by_depth(steps, 100)
    assert (shallow["steps"], deep["steps"], deep["from"], deep["rows"]) == (2, 1, 80, 8)
