"""`baton demo` with real workers: tokens on the screen, a summary, and nothing left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.cluster import alive, descendants


def test_tokens_then_a_summary_then_nothing(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    children: set[int] = set()
    with shown.open("w") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton.cli.main", "demo", "--ray-address", "none"],
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
    assert len(children) == 6, "two workers of two processes, their supervisor, and the router"
    assert not [pid for pid in children if alive(pid)]
    text = shown.read_text()
    assert "The relay team lined up on the wet track, and" in text
    assert re.search(r"KV cache shipped: [1-9]\d* blocks of [\d.]+ KiB = [\d.]+ [KM]iB", text), text
    for word in ("TTFT", "TPOT", "prefill-0", "decode-0"):
        assert word in text
    assert text.count("length") + text.count("stop") >= 4, text
