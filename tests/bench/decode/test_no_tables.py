"""A run of `bench.decode` that finds no tables: what a worker's start would find there, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.gemm_dispatch.choice import Choice, ProductKey
from baton.engine.gemm_dispatch.table import ProductTable, entry_of
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
from baton.engine.tuning import tuner
from bench.case import DecodeCase
from bench.decode.products import no_tables, products_of, tune_missing
from bench.shapes import Precision

GPU = "NVIDIA H100 80GB HBM3"
SHAPE = "llama-3.1-8b"


@pytest.fixture(autouse=True)
def kernels_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of this test's own; what a run sets ends with the test."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def keys() -> list[ProductKey]:
    return [ProductKey.of(product, 64, torch.bfloat16) for product in products_of(SHAPE, Precision("bf16"))]


def choices(gpu: str) -> list[Choice]:
    table = ProductTable.for_gpu(gpu, capability=(9, 0))
    return [table.choice(key) for key in keys()]


def test_neither_this_gpus_table_nor_its_stand_in_is_read() -> None:
    shipped, rule = choices(GPU), [ProductTable([]).choice(key) for key in keys()]
    assert shipped != rule
    with no_tables():
        assert choices(GPU) == rule
        assert choices("NVIDIA H20") == rule
    assert choices(GPU) == shipped


def test_what_is_tuned_within_the_limit_of_a_start_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    best, limits = SkinnyTuning(64, 256, 32, 3, 7, 8), []

    def tune(wanted: Any, dtype: torch.dtype, *rest: Any) -> list[dict[str, Any]]:
        limits.append(rest[-1])
        return [entry_of(ProductKey.of(product, rows, dtype), best, 1.0) for product, rows in wanted]

    monkeypatch.setattr(tuner, "tune", tune)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    case = DecodeCase(SHAPE, Precision("bf16"), 64, 1024, "greedy", "fast")
    with no_tables():
        tune_missing(case, 64, tuner.LIMIT_S)
        assert choices(GPU) == [best] * len(keys())
    assert limits == [tuner.LIMIT_S]
    assert best not in choices(GPU)
