"""Floors, bytes and who fits, against figures worked out by hand."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.engine.gemm_dispatch.table import shipped_entries
from bench.case import MOST_READ_BYTES_S, DecodeCase, EngineSize
from bench.decode import __main__ as bench_decode
from bench.decode import products
from bench.decode.budget import budget
from bench.options import settings_of
from bench.shapes import SHAPES, Precision


def llama(batch: int, context: int = 1024) -> DecodeCase:
    return DecodeCase("llama-3.1-8b", Precision("bf16"), batch, context, "greedy", "fast")


def test_floor_is_the_bytes_over_the_speed() -> None:
    # 7.50 G elements of weights are read; a token's KV is 128 KiB.
    assert llama(1).token_bytes == 131_072
    assert llama(1).floor_ms(1120, 3.16e12) == pytest.approx((2 * 7_504_658_432 + 1120 * 131_072) / 3.16e9)
    assert llama(1).floor_ms(1120, 3.16e12) == pytest.approx(4.80, abs=0.005)
    assert llama(256).floor_ms(1120, 3.16e12) == pytest.approx(16.64, abs=0.005)
    assert llama(64).floor_ms(1120, 4e12, rows=1) == llama(1).floor_ms(1120, 4e12)


@pytest.mark.parametrize(
    ("quantization", "bytes_of_layers"),
    [("fp8", 6_979_321_856 + 4 * 32 * 43_008), ("int4", 6_979_321_856 * (0.5 + 4 / 128))],
)
def test_floor_of_quantised_weights(quantization: str, bytes_of_layers: float) -> None:
    """The head stays at full width unless it is to be quantised too; each of a layer's 43,008 rows and of the
    head's 128,256 has a scale, or its groups have."""
    layers = Precision("bf16", quantization)
    case = DecodeCase("llama-3.1-8b", layers, 1, 1024, "greedy", "fast")
    read = bytes_of_layers + 2 * 525_336_576 + 1120 * 131_072
    assert case.floor_ms(1120, 3.16e12) == pytest.approx(read / 3.16e9)
    head = {"fp8": 525_336_576 + 4 * 128_256, "int4": 525_336_576 * (0.5 + 4 / 128)}[quantization]
    read = bytes_of_layers + head + 1120 * 131_072
    case = replace(case, precision=replace(layers, quantize_head=True))
    assert case.floor_ms(1120, 3.16e12) == pytest.approx(read / 3.16e9)


def test_layers_with_a_window_read_no_more_than_it() -> None:
    # 5 of 34 layers see all tokens, the others 1,024; 2 x 4 heads x 256 elements a token and layer.
    gemma = SHAPES["gemma-3-4b"]
    assert gemma.kv_elements_read(500) == 34 * 2048 * 500
    assert gemma.kv_elements_read(8192) == 2048 * (5 * 8192 + 29 * 1024)


def test_a_window_of_seconds_has_room_for_as_many_steps_as_can_be() -> None:
    size = EngineSize.steady([llama(8), llama(1)], None)
    assert (size.slots, size.tokens) == (8, 1024 + 160 + 18 + 1)
    longer = EngineSize.steady([llama(8), llama(1)], 10.0)
    least_ms = llama(1).floor_ms(1024, MOST_READ_BYTES_S)
    assert longer.tokens - size.tokens == pytest.approx(10_000 / least_ms, abs=1)


def test_what_does_not_fit_is_reported_before_anything_is_allocated() -> None:
    assert EngineSize.steady([llama(3, 131_072)], None).lacking(llama(3, 131_072), 79.2e9) is None
    reported = EngineSize.steady([llama(4, 131_072)], None).lacking(llama(4, 131_072), 79.2e9)
    assert reported is not None
    assert reported.startswith("4 sequences of 131251 tokens want 68.8 GB of KV")
    assert "16.1 GB of weights" in reported
    assert "79.2 GB are free" in reported


def test_a_budget_adds_up_to_the_step() -> None:
    products = {"qkv": 1.0, "output": 2.0, "gate_up": 3.0, "down": 4.0, "head": 5.0}
    parts = {**products, "attention": 6.0, "front": 7.0}
    table = budget(parts, tpot_us=40.0, tail_us=2.5)
    assert table["products"] == 15.0
    assert table["rest"] == 9.5
    assert table["boundaries"] == 40.0 - 15.0 - 6.0 - 9.5
    assert budget(parts, 40.0, None)["rest"] == 7.0


def test_help_needs_no_torch() -> None:
    no_torch = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['--help']"
    code = f"{no_torch}\nfrom bench.decode.__main__ import main\nmain()"
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert reported.returncode == 0, reported.stderr
    assert "--churn" in reported.stdout


def test_cases_without_steps_of_so_many_rows_are_left_out() -> None:
    case = DecodeCase("tiny", Precision("bf16"), 1, 1024, "greedy", "fast")
    cases = [
        replace(case, batch=batch, rows_per_slot=rows, accept=accept)
        for batch in (1, 8, 64, 128)
        for rows in (1, 2, 4, 8)
        for accept in (0.0, 0.5)
    ]
    left = [(one.batch, one.rows_per_slot) for one in bench_decode.possible(cases)]
    assert left[:4] == [(1, 1), (8, 1), (64, 1), (128, 1)]
    assert left[4::2] == left[5::2] == [(1, 8), (8, 2), (8, 4), (8, 8), (64, 2), (64, 4), (128, 2)]


def test_what_is_printed_names_each_choice_of_precision() -> None:
    case = DecodeCase("tiny", Precision("bf16", "int8", quantize_head=True), 8, 1024, "greedy", "fast")
    assert settings_of(case) == {
        "shape": "tiny",
        "dtype": "bf16",
        "quantization": "int8",
        "quantize_head": True,
        "kv_dtype": "auto",
        "batch": 8,
        "context": 1024,
        "sampling": "greedy",
        "numerics": "fast",
        "rows_per_slot": 1,
        "accept": 0.0,
        "text": "random",
        "lookahead_mb": 0,
        "ends": 0.0,
        "tensor_parallel": 1,
    }


@pytest.mark.parametrize("program", [bench_decode.main, products.main], ids=["decode", "products"])
def test_a_quantised_head_needs_to_know_how(
    program: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--shape", "tiny", "--quantize-head"])
    with pytest.raises(SystemExit, match="--quantize-head needs --quantization"):
        program()


def test_each_product_is_measured_once_and_what_is_known_not_at_all() -> None:
    """Mistral 7B's layers have the shapes of Llama 3.1 8B's; its head does not."""
    arguments = argparse.Namespace(rows=64, only=(), buckets=("32", "64"), tensor_parallel=1)
    names = ["llama-3.1-8b", "mistral-7b"]
    wanted = products.wanted_of(names, Precision("bf16"), arguments, [])
    measured = {
        name: sorted((product.name, rows) for product, rows in pairs) for name, pairs in wanted.items()
    }
    of_layer = [(name, rows) for name in ("down", "gate_up", "head", "output", "qkv") for rows in (32, 64)]
    assert measured == {"llama-3.1-8b": of_layer, "mistral-7b": [("head", 32), ("head", 64)]}
    known = shipped_entries("NVIDIA H200")
    assert products.wanted_of(names[:1], Precision("bf16"), arguments, known) == {"llama-3.1-8b": []}
    arguments.tensor_parallel = 2
    divided = ["llama-3.1-8b", "llama-3.1-70b"]
    assert not any(products.wanted_of(divided, Precision("bf16"), arguments, known).values())
    halves = products.wanted_of(names[:1], Precision("bf16"), arguments, [])["llama-3.1-8b"]
    shapes = {product.name: tuple(product.linear.weight.shape) for product, _ in halves}
    assert shapes["qkv"] == (3072, 4096)
    assert shapes["down"] == (4096, 7168)
