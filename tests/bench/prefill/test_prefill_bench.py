"""`bench.prefill` on a CPU with a tiny model: its arithmetic, and every path of its driver."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from baton.engine.model.layers.attention import Attention
from baton.engine.prefill.attention import PlannedRows, PromptAttention
from baton.engine.prefill.gpu_pass import PrefillPass
from bench.precision import Precision
from bench.prefill.__main__ import _parser, cases_of, run_all
from bench.prefill.attention import Bench
from bench.prefill.case import TIERS, Case, parse_prompts
from bench.prefill.engine import PrefillEngine
from bench.prefill.kinds import budget, kind_of
from bench.shapes import SHAPES, Shape
from tests.engine.prompt_passes import SMALL_RULE, SMALL_TUNING


def arguments(*texts: str) -> argparse.Namespace:
    tiny = ("--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--json", "--repeats", "1")
    return _parser().parse_args([*tiny, *texts])


def test_operations_are_the_products_and_the_keys_seen() -> None:
    case = Case("llama-3.1-8b", Precision("bf16"), 1, 8192, 8192)
    body, attention = 2 * 6.98e9 * 8192, 4 * 32 * 4096 * 8192 * 8193 / 2
    assert case.flops == pytest.approx(body + attention + 2 * 0.525e9, rel=2e-3)
    cached = Case("llama-3.1-8b", Precision("bf16"), 2, 7168, 8192, 90)
    assert cached.prefix == 6400 // 64 * 64
    whole, prefix = (
        Case("llama-3.1-8b", Precision("bf16"), 1, 7168, 8192),
        Case("llama-3.1-8b", Precision("bf16"), 1, 6400, 8192),
    )
    assert cached.flops == pytest.approx(2 * (whole.flops - prefix.flops), rel=1e-3)


def test_cases_are_every_combination() -> None:
    assert parse_prompts("8x1024,1x8192") == [(8, 1024), (1, 8192)]
    cases = cases_of(arguments("--prompts", "1x200,2x100", "--cached", "0,90", "--tier", "device,disk"))
    assert len(cases) == 2 * 3
    with pytest.raises(SystemExit, match="tiers are"):
        cases_of(arguments("--tier", "tape"))


def test_kernels_are_classified_by_name() -> None:
    names = {
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention, library",
        "_prompt_attention": "attention, paged",
        "_join_parts": "attention, joined",
        "_gated": "activation",
        "something else": "other",
    }
    assert {name: kind_of(name) for name in names} == names
    assert budget([("_norm", 1.0), ("nvjet", 2.0), ("_norm", 0.5)]) == {"products": 2.0, "norm": 1.5}


def test_every_tier_finds_the_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reported = arguments(
        "--prompts", "3x200", "--cached", "0,50", "--tier", ",".join(TIERS), "--chunk-tokens", "96"
    )
    run_all(cases_of(reported), reported, tmp_path)
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(case["cached"], case["tier"], case["hit_tokens"]) for case in cases] == [
        (0, "device", 0),
        *((50, tier, 3 * 64) for tier in TIERS),
    ]
    assert all(case["tok_s"] > 0 and case["ms"] >= case["device_ms"] > 0 for case in cases)


def test_attention_alone_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.prefill.attention.tunings", lambda: [SMALL_TUNING])
    bench = Bench("tiny", "fp32", 50, 13, "cpu", SMALL_RULE)
    paged, library = bench.measure()
    assert (paged["rows"], library["start"]) == (13, 50)
    assert library["plan_s"] >= 0
    assert paged["us"] > 0


def test_attention_of_layers_with_windows_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    windows = {"sliding_window": 8, "sliding_window_pattern": 2}
    config = {**SHAPES["gemma-3-1b"].config, **sizes, **windows}
    monkeypatch.setitem(SHAPES, "windows", Shape(config))
    monkeypatch.setattr("bench.prefill.attention.tunings", lambda: [SMALL_TUNING])
    bench = Bench("windows", "fp32", 18, 5, "cpu", SMALL_RULE)
    groups: list[int | None] = []
    run = PromptAttention.run

    def noted(self: PromptAttention, attention: Attention, rows: int, planned: PlannedRows) -> Tensor:
        groups.append(bench.decoder.layout.groups[attention.group].window)
        return run(self, attention, rows, planned)

    monkeypatch.setattr(PromptAttention, "run", noted)
    paged, library = bench.measure()
    assert groups == [8, None, 8, None]
    assert paged["us"] > 0 < library["us"]
    assert (bench.pairs(8), bench.pairs(None)) == (5 * 8, 5 * 18 + 15)


@pytest.mark.slow
def test_the_kernels_run_in_it(tmp_path: Path) -> None:
    case = Case("tiny", Precision("fp32"), 1, 90, 64)
    engine = PrefillEngine([case], "cpu", tmp_path, make_pass=partial(PrefillPass, rule=None))
    found = engine.measure(case, 1)
    assert found["hit_tokens"] == 0
    assert found["tok_s"] > 0
    assert engine.profile(case) == {}
