"""Deadlines of first tokens, as the scheduler of an engine knows them."""

from __future__ import annotations

import math
from pathlib import Path

from tests.worker.engine.stepped_engine import SteppedEngine, prefill


def test_a_requests_limit_reaches_the_scheduler(tmp_path: Path) -> None:
    """No limit, and what is none, is infinite."""
    engine = SteppedEngine(tmp_path, "prefill")
    given = {b"a": 2.5, b"b": 0.0, b"c": -1.0, b"d": math.nan}
    for name, due_s in given.items():
        engine.send(prefill=prefill(None, name=name, most=0, tokens=30, first_token_in_s=due_s))
    engine.turn()
    sequences = engine.engine.prefill.steps.scheduler.sequences
    assert [one.first_token_in_s for one in sequences] == [2.5, math.inf, math.inf, math.inf]
    engine.run_out()
    engine.close()
