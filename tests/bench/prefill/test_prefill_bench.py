"""`bench.prefill` on a CPU with a tiny model: its arithmetic, and every path of its driver."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from baton.engine.prefill.gpu_pass import PrefillPass
from bench.case import TIERS, PrefillCase, parse_prompts
from bench.prefill.__main__ import cases_of, command_parser, main, run_all
from bench.prefill.engine import PrefillEngine, budget, kind_of
from bench.shapes import Precision


def arguments(*texts: str) -> argparse.Namespace:
    tiny = ("--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--json", "--repeats", "1")
    return command_parser().parse_args([*tiny, *texts])


def test_operations_are_the_products_and_the_keys_seen() -> None:
    case = PrefillCase("llama-3.1-8b", Precision("bf16"), 1, 8192, 8192)
    body, attention = 2 * 6.98e9 * 8192, 4 * 32 * 4096 * 8192 * 8193 / 2
    assert case.flops == pytest.approx(body + attention + 2 * 0.525e9, rel=2e-3)
    cached = PrefillCase("llama-3.1-8b", Precision("bf16"), 2, 7168, 8192, 90)
    assert cached.prefix == 6400 // 64 * 64
    whole, prefix = (
        PrefillCase("llama-3.1-8b", Precision("bf16"), 1, 7168, 8192),
        PrefillCase("llama-3.1-8b", Precision("bf16"), 1, 6400, 8192),
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
        "_grouped_codes": "experts, products",
        "_route": "experts, router and sum",
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


def test_a_model_that_devices_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a cache of its heads; blocks of the lower tiers are whole."""
    reported = arguments("--prompts", "1x150", "--cached", "50", "--tier", "host", "--tensor-parallel", "2")
    run_all(cases_of(reported), reported, tmp_path)
    case = json.loads(capsys.readouterr().out)
    assert (case["tensor_parallel"], case["hit_tokens"]) == (2, 64)


def test_figures_of_several_devices_are_of_whole_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.prefill", "--tensor-parallel", "2", "--fairness"])
    with pytest.raises(SystemExit, match="goes with neither"):
        main()


@pytest.mark.slow
def test_the_kernels_run_in_it(tmp_path: Path) -> None:
    case = PrefillCase("tiny", Precision("fp32"), 1, 90, 64)
    engine = PrefillEngine([case], "cpu", tmp_path, make_pass=partial(PrefillPass, rule=None))
    found = engine.measure(case, 1)
    assert found["hit_tokens"] == 0
    assert found["tok_s"] > 0
    assert engine.profile(case) == {}
