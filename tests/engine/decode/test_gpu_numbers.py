"""Every part of a decode step gives numbers, in every format and with any number of rows: which kernels
compute products, attention and experts depends on both, and a row that is no number stays so by its KV."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.forward.layers.experts import run_experts
from baton.engine.forward.layers.mlp import run_dense_mlp
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.plan.decode_state import SIMPLE
from bench.case import DecodeCase, EngineSize
from bench.decode.engine import DecodeEngine
from bench.decode.front import Front
from bench.shapes import SHAPES, Precision

CONTEXT, STEPS = 1024, 3
ROWS = (1, 2, 4, 5, 8, 16, 17, 32, 64)
FORMATS = {
    "bf16": Precision("bf16"),
    "KV in fp8": Precision("bf16", kv_dtype="fp8"),
    "fp8": Precision("bf16", "fp8"),
    "fp8, KV in fp8": Precision("bf16", "fp8", kv_dtype="fp8"),
    "int8": Precision("bf16", "int8"),
    "int4": Precision("bf16", "int4"),
}
DENSE = ("llama-3.1-8b", "qwen3-8b", "gemma-3-4b")
MIXTURES = ("qwen3-30b-a3b", "mixtral-8x7b")
# Experts are refused in int8.
SERVED = [
    (shape, name) for shape in (*DENSE, *MIXTURES) for name in FORMATS if shape in DENSE or name != "int8"
]


def no_numbers(x: Tensor) -> list[int]:
    """The rows that hold something else than numbers."""
    return x.float().isfinite().all(1).logical_not().nonzero().flatten().tolist()


def parts_of(engine: DecodeEngine, rows: int) -> Iterator[tuple[str, Callable[[], object], Tensor]]:
    """The parts of a step of the sequences that run, in their order: name, launch, and what that writes."""
    step: Any = engine.loop.step_state  # type: ignore[attr-defined]
    pass_, space = step.pass_, step.pass_.workspace
    hidden = space.hidden[:rows]
    step.begin(rows, SIMPLE)
    step.plan(rows)
    yield "embedding", partial(pass_.embed, rows, space), hidden
    for number, layer in enumerate(engine.decoder.layers):
        attention, mlp = layer.attention, layer.mlp
        qkv, out, inner = space.qkv[:rows], space.attn_out[:rows], space.inner[:rows]
        yield f"qkv of layer {number}", partial(pass_.gemm, attention.qkv, qkv, hidden), qkv
        yield f"attention of layer {number}", partial(pass_.attend, attention, rows, space), out
        add = partial(pass_.gemm.add, attention.residual, attention.output, hidden, out, None)
        yield f"output of layer {number}", add, hidden
        if isinstance(mlp, ExpertsMlp):
            yield f"experts of layer {number}", partial(run_experts, space.experts, mlp, hidden), hidden
        else:
            yield f"MLP of layer {number}", partial(run_dense_mlp, pass_.gemm, mlp, hidden, inner), hidden
    yield "head", partial(pass_.head, rows, space), pass_.logits[:rows]


def run_steps(engine: DecodeEngine, case: DecodeCase) -> str:
    """Decodes some tokens of as many sequences as the case has → what is wrong, or nothing."""
    rows = case.batch
    for number in range(rows):
        engine.admit(case, number, 40)
    wanted = engine.loop.tokens_decoded + STEPS * rows
    engine.turn_until(lambda: engine.loop.tokens_decoded >= wanted)
    engine.drain()
    logits = engine.loop.step_state.pass_.logits[:rows]  # type: ignore[attr-defined]
    found = ""
    if bad := no_numbers(logits):
        found = f"{rows} rows: logits of rows {bad} are no numbers"
        for name, launch, out in parts_of(engine, rows):
            launch()
            if bad := no_numbers(out):
                found += f", first after {name}, of rows {bad}"
                break
    engine.empty()
    return found


def prove(case: DecodeCase, rows: tuple[int, ...], **options: Any) -> None:
    """Each number of rows; on a new engine where those before had something wrong, which stays in a cache."""
    found: list[str] = []
    engine: DecodeEngine | None = None
    try:
        for count in rows:
            engine = engine or DecodeEngine(case, EngineSize(max(rows), case.context + 60), Front, **options)
            if wrong := run_steps(engine, replace(case, batch=count)):
                found.append(wrong)
                engine.close()
                engine = None
                gc.collect()  # a second model of published widths may not fit beside it
    finally:
        if engine is not None:
            engine.close()
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "precision"), SERVED)
def test_steps_of_published_widths(monkeypatch: pytest.MonkeyPatch, shape: str, precision: str) -> None:
    cut = replace(SHAPES[shape], config=SHAPES[shape].config | {"num_hidden_layers": 2})
    monkeypatch.setitem(SHAPES, "cut", cut)
    prove(DecodeCase("cut", FORMATS[precision], 1, CONTEXT, "greedy", "fast"), ROWS)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@torch.no_grad()
def test_the_first_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs in the interpreter, with a weight that is not a number."""
    monkeypatch.setitem(SHAPES, "cut", SHAPES["tiny"])
    case = DecodeCase("cut", Precision("fp32"), 2, 20, "greedy", "fast")
    prove(case, (2,), device="cpu", interpreted=True)
    engine = DecodeEngine(case, EngineSize(2, 80), Front, device="cpu", interpreted=True)
    engine.decoder.layers[1].attention.output.linear.weight[0, 0] = float("nan")
    found = run_steps(engine, case)
    engine.close()
    assert found.startswith("2 rows: logits of rows [0, 1] are no numbers, first after output of layer 1, of")
