"""The programs that measure what drafts cost, on a CPU with a tiny model."""

from __future__ import annotations

import pytest

from baton.engine.kernels.gpu.attention.items import AttentionTuning
from bench.decode import attention, drafts
from bench.shapes import Precision


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_attention_of_rows(kv_dtype: str) -> None:
    run = attention.RowsRun("tiny", Precision("fp32", kv_dtype=kv_dtype), 1, 66, "cpu", layers=1)
    found = list(run.measure([5], exact=True, tunings=[AttentionTuning(2, 2)]))
    assert [(line["kernel"], line["rows"], line["per_item"]) for line in found] == [
        ("plain", 1, 1), ("rows", 5, 8), ("single", 5, 1), ("rows", 5, 2), ("rows", 5, 4), ("rows", 5, 8),
    ]  # fmt: skip
    assert (found[0]["of_plain"], found[-1]["warps"]) == (1.0, 2)
    assert all(line["us"] > 0 for line in found)


@pytest.mark.parametrize(("kind", "mean"), [("random", 0), ("repeats", 7), ("constant", 7)])
def test_lookup(kind: str, mean: float) -> None:
    found = drafts.measure(3, 1024, kind, "cpu", 1, output_tokens=9)
    assert (found["slots"], found["history"], found["text"], found["mean_drafts"]) == (3, 1024, kind, mean)
    assert min(found["us"], found["probed_us"], found["fill_us"]) > 0
