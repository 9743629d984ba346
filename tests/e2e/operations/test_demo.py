"""`baton demo` with real workers: right answers on the screen, a summary, and nothing left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.base.process_stat import is_running
from tests.e2e.support.cluster import descendants


@pytest.mark.slow
def test_answers_then_a_summary_then_nothing(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    children: set[int] = set()
    with shown.open("w") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "demo", "--ray-address", "none"],
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        )
        for _ in range(600):
            children.update(descendants(process.pid))
            try:
                process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        err.seek(0)
        assert process.wait() == 0, err.read()
    assert len(children) == 7, "two workers of two processes, their supervisor, the router, and Redis"
    assert not [pid for pid in children if is_running(pid)]
    text = shown.read_text()
    # What any right model answers; the demo model's JSON is free to have values of its own.
    assert "The value of golden lantern is 9741." in text
    assert "Result: 98895" in text
    assert "1. amber fox 2. quiet harbor 3. red lantern 4. swift otter" in text
    assert re.search(r'\{"team": "[a-z ]+", "score": \d+, "tags": \["[a-z ]+", "[a-z ]+"\]\}', text), text
    assert re.search(r"KV cache shipped: [1-9]\d* blocks of [\d.]+ KiB = [\d.]+ [KM]iB", text), text
    for word in ("TTFT", "TPOT", "prefill-0", "decode-0"):
        assert word in text
    assert text.count(" stop") == 5, text
