"""Log lines of an engine's start on a simulated GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from pydantic import ValidationError
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from baton.engine.decode.slot_state import SlotState
from services.common.config.worker import EngineConfig
from services.worker.engine.startup.device_memory import device_memory
from services.worker.engine.startup.memory_plan import link_bytes
from services.worker.engine.startup.model_loader import load
from services.worker.engine.startup.startup_log import capture_logged, log_memory
from tests.engine.local_engine import CONFIG

GPU = torch.device("cuda", 0)


def test_compiled_and_cached_kernels_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with capture_logs() as logs, capture_logged(GPU):
        listen = triton.knobs.compilation.listener
        for hit in (True, False, True):
            listen(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    (line,) = logs
    assert (line["event"], line["kernels"], line["compiled"]) == ("graphs_captured", 3, 1)
    assert line["kernel_cache"] == str(tmp_path)


def test_nothing_is_logged_for_a_cpu_or_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with capture_logs() as logs:
        with capture_logged(torch.device("cpu")):
            pass
        assert not (tmp_path / "cache").exists()
        with capture_logged(GPU):
            pass
    assert logs == []


def test_a_kernel_cache_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BatonError, match="kernel_cache") as caught, capture_logged(GPU):
        raise AssertionError
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(("lookup", "tokens"), [(64, 64), (32_768, 512)])
def test_memory_of_drafts_is_told(tmp_path: Path, lookup: int, tokens: int) -> None:
    """On a CPU too; the history is as long as the context where that is shorter than the lookup."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = EngineConfig(
        device="cpu", weights="random", slots=6, speculation="lookup", draft_tokens=3, lookup_tokens=lookup
    )
    model = load(str(tmp_path), engine)
    state = SlotState(6, (1,), 97, model.device, model.rows_per_slot, engine.history_tokens(512))
    with capture_logs() as logs:
        log_memory(model, engine)
        log_memory(replace(model, rows_per_slot=1), engine)
    (line,) = logs
    assert (line["event"], line["slots"], line["draft_tokens"]) == ("memory", 6, 3)
    assert line["history_bytes"] == 6 * tokens * 4
    assert state.history is not None
    assert state.drafts is not None
    assert state.history.device_bytes == line["history_bytes"]
    drafts = state.drafts
    arrays = drafts.tokens, drafts.count, drafts.source, drafts.most, drafts.tag
    assert line["draft_bytes"] == sum(array.nbytes for array in arrays)
    assert "lookahead_bytes" not in line
    with capture_logs() as logs:
        log_memory(model, engine.model_copy(update={"lookahead_table_mb": 2}))
    assert logs[0]["lookahead_bytes"] == 2_000_000


def test_memory_of_each_device_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 2}))
    engine = EngineConfig(device="cpu", weights="random", kv_memory_mb=40, tensor_parallel=2)
    model = load(str(tmp_path), engine)
    with capture_logs() as logs:
        log_memory(model, engine)
    (line,) = logs
    assert (line["event"], line["devices"], len(line["weights_gb"])) == ("model_divided", 2, 2)
    assert line["kv_gb"][0] == line["kv_gb"][1] > 0
    reported = device_memory(model)
    assert [one.index for one in reported] == [0, 1]
    assert [one.weights_bytes for one in reported] == [rank.nbytes for rank in model.ranks]
    assert [one.kv_bytes for one in reported] == [cache.nbytes for cache in model.cache.ranks]
    assert [(one.used_bytes, one.total_bytes) for one in reported] == [(0, 0)] * 2


def test_memory_of_each_gpu_is_told_with_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 2}))
    engine = EngineConfig(device="cpu", weights="random", kv_memory_mb=40, tensor_parallel=2)
    model = load(str(tmp_path), engine)
    for rank, index in zip(model.ranks, (3, 1), strict=True):
        rank.device = torch.device("cuda", index)
    model = replace(model, device=model.ranks[0].device)
    free = {3: 70 * 10**9, 1: 60 * 10**9}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 10**9)
    with capture_logs() as logs:
        log_memory(model, engine)
        log_memory(replace(model, kernel_bytes=(10**9, 2 * 10**9)), engine)
    lines = [line for line in logs if line["event"] == "memory"]
    assert [line["gpu"] for line in lines] == [3, 1] * 2
    assert [line.get("kernels_gb") for line in lines] == [None, None, 1.0, 2.0]
    for before, after in zip(lines[:2], lines[2:], strict=True):
        more = after["planned_other_gb"] - before["planned_other_gb"]
        assert more == pytest.approx(after["kernels_gb"])
    reported = device_memory(model)
    assert [(one.index, one.used_bytes // 10**9) for one in reported] == [(3, 10), (1, 20)]
    assert {one.total_bytes for one in reported} == {80 * 10**9}


@pytest.mark.parametrize("workers", [1, 2])
def test_memory_adds_up(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = EngineConfig(device="cpu", weights="random", kv_memory_mb=100, gpu_workers=workers, gpu_links=8)
    model = replace(load(str(tmp_path), engine), device=GPU)
    model.ranks[0].device = GPU
    blocks = sum(group.nbytes for group in model.cache.ranks[0].groups)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 10**9)
    with capture_logs() as logs:
        log_memory(model, engine)
    (line,) = logs
    assert (line["event"], line["gpu"], line["gpu_used_gb"], line["gpu_gb"]) == ("memory", 0, 10.0, 80.0)
    known = line["weights_gb"] + line["kv_gb"]
    assert line["kv_gb"] == round(blocks / 1e9, 2)
    assert line["buffers_gb"] == pytest.approx(2 - known, abs=0.02)
    assert line["planned_links_gb"] == round(link_bytes(engine, model.layout) / 1e9, 2) > 0
    assert (line["kv_dtype"], line["kv_bytes_per_token"]) == (
        "float32",
        model.layout.groups[0].block_bytes // 16,
    )
    if workers == 1:
        assert line["other_gb"] == pytest.approx(10 - known, abs=0.02)
    else:
        assert "other_gb" not in line


def test_quantised_weights_are_planned_held_and_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    full, fp8 = (
        load(str(tmp_path), EngineConfig(device="cpu", weights="random", kv_memory_mb=1, quantization=name))
        for name in (None, "fp8")
    )
    assert (full.weight_format, fp8.weight_format) == ("float32", "fp8")
    assert fp8.ranks[0].nbytes < full.ranks[0].nbytes
    assert (full.checkpoint, full.fingerprint) == (fp8.checkpoint, fp8.fingerprint)  # they may be a pair
    with_head = EngineConfig(
        device="cpu", weights="random", kv_memory_mb=1, quantization="fp8", quantize_head=True
    )
    head = load(str(tmp_path), with_head)
    assert head.weight_format == "fp8+head"
    assert head.ranks[0].head.linear.format == "fp8"
    assert head.ranks[0].nbytes < fp8.ranks[0].nbytes
    assert head.fingerprint == fp8.fingerprint


def test_a_quantised_head_needs_a_format() -> None:
    with pytest.raises(ValidationError, match="quantize_head needs quantization"):
        EngineConfig(quantize_head=True)
