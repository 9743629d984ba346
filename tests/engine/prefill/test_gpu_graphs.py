"""Prefill steps as graphs on a GPU: bitwise what single launches compute, without a wait of the host."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from baton.engine.memory.kv_cache import KVCache
from baton.engine.plan.step_plan import Chunk, step_of
from baton.engine.prefill.attention_plan import LibraryRule
from baton.engine.prefill.gpu_pass import PrefillPass
from bench.engine_driver import random_model
from bench.shapes import SHAPES, Precision, Shape
from tests.engine.graph_twins import GraphTwins
from tests.engine.prefill.test_gpu_numerics import BLOCK_TOKENS, SIZES, no_waiting

pytestmark = pytest.mark.gpu
SHORT = (1100, 1500, 1030, 2000, 1100, 1900, 3000, 1200, 1300, 1400, 1500, 2500)


def twins(folder: Path, family: str, lengths: tuple[int, ...], rule: LibraryRule | None = None) -> GraphTwins:
    window = {"sliding_window": 300} if family == "windows" else {}
    return GraphTwins(
        folder, family, lengths=lengths, most_rows=2048, block_tokens=BLOCK_TOKENS, rule=rule,
        settings={**SIZES, **window, "head_dim": 128}, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "windows", "mixture"])
def test_every_number_of_rows(tmp_path: Path, family: str) -> None:
    draw = random.Random(7)
    with torch.inference_mode():
        made = twins(tmp_path, family, SHORT)
        for wide in range(64, 1025, 64):
            for rows in (wide - 1, wide, wide + 1):
                made.check(made.packing(draw, rows, draw.randint(1, 12)))
    assert (made.steps, made.replayed) == (48, 47), "1,025 rows are no graph"
    print(f"\nPROOF prefill graphs, {family}: {made.replayed} steps replayed, bit for bit")


def test_far_into_a_long_prompt(tmp_path: Path) -> None:
    """Keys shared among programs, chunks for the library in between, short prompts beside."""
    draw = random.Random(8)
    long = 30_000
    with torch.inference_mode():
        made = twins(tmp_path, "llama", (long, *SHORT), LibraryRule.of(2048))
        while made.done[0] < long - 4000:
            made.check([(0, made.done[0], 2000)])
        assert made.replayed == 0
        parted = 0
        for rows in (1, 16, 100, 383, 384, 600, 60, 200, 256):
            others = draw.randint(0, 1024 - rows)
            pieces = [(0, made.done[0], rows)]
            if others:
                pieces.append((1 + made.steps % len(SHORT), 0, others))
            made.check(pieces)
            parted += bool(made.graphed.attention.sums[:, 2048:].isfinite().any())
    assert parted >= 4
    assert made.replayed == 7, "384 rows and 600 are the library's"


def test_steps_launched_ahead_do_not_disturb_one_another(tmp_path: Path) -> None:
    """Inputs of a step are put where the one before reads its own: in the stream's order, with no waiting."""
    draw = random.Random(9)
    with torch.inference_mode():
        made = twins(tmp_path, "windows", SHORT)
        steps = []
        for _ in range(40):
            pieces = [(number, 0, count) for number, _, count in made.packing(draw, draw.randint(1, 900), 9)]
            steps.append(
                step_of(Chunk(made.sequences[number], start, count) for number, start, count in pieces)
            )
        expected = [made.eager.forward(step).clone() for step in steps]
        torch.cuda.synchronize()
        with no_waiting():
            found = [made.graphed.forward(step).clone() for step in steps]
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)
    assert made.replayed == len(steps)


@pytest.mark.whole_gpu
def test_few_rows_of_codes_are_not_padded_to_many() -> None:
    """A layer's products of 8-bit codes take the host longer to launch than a GPU to run."""
    small = {"num_hidden_layers": 1, "vocab_size": 512, "eos_token_id": 0}
    shape = Shape({**SHAPES["llama-3.1-8b"].config, **small})
    model = random_model(shape, Precision("bf16", "fp8"), 2048, BLOCK_TOKENS, "cuda")
    made = PrefillPass(model, KVCache(model.layout, 1 + 2048 // BLOCK_TOKENS, "cuda"), 2048, None)
    made.warm()
    made.measure_products()
    assert made.row_times.padded(64) <= 256
    assert made.row_times.padded(1024) == 1024
