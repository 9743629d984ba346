"""The prefill pass in half precision by its logits: the error against float64 on the same weights is at most
1.5 times that of the plain-torch pass in that dtype. On a GPU the host never waits, and
the loop launches ahead.

In full on a GPU; on a CPU a few tokens in Triton's interpreter, in float16, since bf16 is not rounded there.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.device.streams.cuda_stream import compute_stream
from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.reference import ReferenceModel
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.plan.step_plan import Chunk, step_of
from baton.engine.prefill.attention import library_rule
from baton.engine.prefill.attention_plan import LibraryRule
from baton.engine.prefill.factory import prompt_pass
from baton.engine.prefill.gpu_pass import PrefillPass
from baton.engine.prefill.prompt_pass import PromptPass
from baton.engine.prefill.reference_pass import ReferencePass
from baton.engine.sequence import Limits, SamplingParams, Sequence
from bench.engine_driver import prefill_step, prompt_executor, take
from tests.engine.dense_weights import random_weights
from tests.engine.forced import relative_rms
from tests.engine.local_engine import CONFIG
from tests.engine.prompt_passes import FAMILIES, SMALL_RULE, SMALL_TUNING

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST = 1.5
BLOCK_TOKENS = 64
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 700,
    "max_position_embeddings": 32768,
}
# For the interpreter, whose time is that of its tiles.
FEW_SIZES: dict[str, Any] = {
    **SIZES,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
Steps = list[list[tuple[int, int, int]]]
# (sequence, first position, rows), a step a line.
LONG: Steps = [
    [(0, 0, 300), (1, 0, 2000)],  # paged; padded by the library
    [(0, 300, 1), (1, 2000, 2047)],
    [(1, 4047, 2048)],  # pieces of the prefix begin at 4,096
    [(0, 301, 500), (1, 6095, 1400)],
    [(1, 7495, 64), (2, 0, 512), (3, 0, 512), (4, 0, 511)],
    [(5, 0, 1024), (6, 0, 1024), (7, 0, 1024), (8, 0, 1024)],  # one call for four
]
FEW: Steps = [[(0, 0, 5), (1, 0, 8), (2, 0, 8)], [(0, 5, 3), (1, 8, 15)], [(1, 23, 9)]]


def passes(
    folder: Path,
    family: str,
    dim: int,
    dtype: torch.dtype,
    steps: Steps,
    rule: LibraryRule | None,
    sizes: dict[str, Any],
) -> Iterator[tuple[str, PromptPass, dict[int, Sequence]]]:
    """The plain pass in float64 and in the dtype, and the kernels', of the same weights."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes, **FAMILIES[family], "head_dim": dim}))
    config = load_config(folder)
    rounded = random_weights(config, 3, torch.device(DEVICE), dtype)
    ends: dict[int, int] = {}
    for number, start, count in (chunk for step in steps for chunk in step):
        ends[number] = max(ends.get(number, 0), start + count)
    blocks = {number: -(-end // BLOCK_TOKENS) for number, end in ends.items()}
    order = (1 + torch.randperm(sum(blocks.values()), generator=torch.Generator().manual_seed(1))).tolist()
    generator, sequences = torch.Generator().manual_seed(2), {}
    for number, end in ends.items():
        tokens = torch.randint(config.vocab_size, (end,), generator=generator).tolist()
        sequences[number] = Sequence(tuple(tokens), end, SamplingParams(), Limits(1))
    for name, kind in (("truth", torch.float64), ("plain", dtype), ("kernels", dtype)):
        layout = config.layout(BLOCK_TOKENS, str(kind).removeprefix("torch."))
        weights = {key: weight.to(kind) for key, weight in rounded.items()}
        model = Model(config, weights, layout, DEVICE, Precision.of(kind))
        cache = KVCache(layout, 1 + len(order), DEVICE)
        first = 0
        for number, count in blocks.items():
            sequences[number].blocks = tuple(tuple(order[first : first + count]) for _ in layout.groups)
            first += count
        most = 4096 if DEVICE == "cuda" else max(sum(count for _, _, count in step) for step in steps)
        tuning: PromptTuning | None = None
        if DEVICE == "cpu":
            tuning = SMALL_TUNING
        made = PrefillPass(model, cache, most, rule, tuning) if name == "kernels" else None
        yield name, made or ReferencePass(ReferenceModel(model), cache), sequences


def logits(made: PromptPass, sequences: dict[int, Sequence], steps: Steps) -> Tensor:
    found = []
    for step in steps:
        chunks = step_of(Chunk(sequences[number], start, count) for number, start, count in step)
        found.append(made.logits(made.forward(chunks)).float().cpu())
    return torch.cat(found)


def prove(
    folder: Path,
    family: str,
    dim: int,
    dtype: torch.dtype,
    steps: Steps,
    rule: LibraryRule | None,
    sizes: dict[str, Any] = SIZES,
) -> float:
    with torch.inference_mode():
        found = {
            name: logits(made, sequences, steps)
            for name, made, sequences in passes(folder, family, dim, dtype, steps, rule, sizes)
        }
    assert bool(found["kernels"].isfinite().all())
    plain, mine = (relative_rms(found[name], found["truth"]) for name in ("plain", "kernels"))
    assert plain > 0
    label = f"{family}, head dim {dim}, {dtype}"
    print(f"\nPROOF prefill {label}: plain error {plain:.3g}, ours / plain: {mine / plain:.3f}")
    return mine / plain


def test_a_few_tokens(tmp_path: Path) -> None:
    assert prove(tmp_path, "llama", 8, torch.float16, FEW, SMALL_RULE, FEW_SIZES) <= MOST


@pytest.mark.slow
def test_a_few_tokens_of_wide_layers(tmp_path: Path) -> None:
    assert prove(tmp_path, "llama", 8, torch.float16, FEW, SMALL_RULE) <= MOST


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_a_gpu(tmp_path: Path, family: str, dim: int, dtype: str) -> None:
    assert prove(tmp_path, family, dim, DTYPES[dtype], LONG, LibraryRule.of(4096)) <= MOST


@pytest.mark.gpu
def test_logits_without_the_library_on_a_gpu(tmp_path: Path) -> None:
    assert prove(tmp_path, "llama", 128, torch.bfloat16, LONG, None) <= MOST
    assert prove(tmp_path, "llama", 256, torch.bfloat16, LONG[:2], None) <= MOST


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    try:
        with warnings.catch_warnings():  # torch calls the mode a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_library_takes_every_shape_of_the_rule(tmp_path: Path) -> None:
    """A shape that the library refuses makes passes slower than they should be, not wrong."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **SIZES, "head_dim": 128}))
    config = load_config(tmp_path)
    layout = config.layout(BLOCK_TOKENS, "bfloat16")
    weights = random_weights(config, 3, torch.device(DEVICE), torch.bfloat16)
    model = Model(config, weights, layout, DEVICE, Precision.of(torch.bfloat16))
    rule = library_rule(model, 2048)
    assert rule is not None
    made = PrefillPass(model, KVCache(layout, 300, DEVICE), 2048, rule)
    assert rule.shapes(2048)
    assert made.refused == 0


@pytest.mark.gpu
def test_a_loop_ahead_of_the_gpu_never_waits_and_draws_the_same(tmp_path: Path) -> None:
    """float32: tokens as the plain pass's, while prompts come and are cancelled."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **SIZES, "head_dim": 64}))
    config = load_config(tmp_path)
    layout = config.layout(BLOCK_TOKENS, "float32")
    weights = random_weights(config, 3, torch.device(DEVICE), torch.float32)
    model = Model(config, weights, layout, DEVICE, Precision.of(torch.float32))
    plain = _drawn(ReferencePass(ReferenceModel(model), KVCache(layout, 400, DEVICE)), model, waits=True)
    mine = _drawn(prompt_pass((model,), KVCache(layout, 400, DEVICE), 512, exact=False), model, waits=False)
    assert len(plain) == 24
    assert {number: plain[number] for number in mine} == mine
    assert 1 <= len(mine) < 24, "some were cancelled"


def _drawn(made: PromptPass, model: Model, *, waits: bool) -> dict[int, int]:
    """First tokens of 24 prompts, by number; unless the host waits, a third are cancelled on the way."""
    pools = BlockPools(model.layout, [400])
    scheduler = PrefillScheduler(pools, StepBounds(512), max_sequences=64)
    executor = prompt_executor(made, scheduler, compute_stream(model.device))
    draw = random.Random(4)
    numbers: dict[Sequence, int] = {}
    for number in range(24):
        tokens = tuple(draw.choices(range(model.config.vocab_size), k=draw.randint(1, 900)))
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=number) if number % 2 else SamplingParams()
        sequence = Sequence(tokens, len(tokens), sampling, Limits(4))
        numbers[sequence] = number
        scheduler.add(sequence)
    found: dict[int, int] = {}
    while scheduler.sequences or executor.prompts.under_way:
        if waits:
            results = prefill_step(executor)
        else:
            with no_waiting():
                executor.step_prompts()
            results = take(executor)
        for result in results:
            if result.token is not None:
                found[numbers[result.chunk.sequence]] = result.token
                scheduler.remove(result.chunk.sequence)
        left = list(scheduler.sequences)
        if not waits and results and left and draw.random() < 0.5:
            scheduler.remove(draw.choice(left))
        pools.check_integrity([s.blocks for s in scheduler.sequences if s.blocks is not None])
    assert pools.free == pools.total
    assert executor.prompts.times.busy_s > 0
    return found
