"""The memory plan: configured blocks, blocks of a share, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from baton.base.errors import BatonError, ErrorKind
from baton.engine.decode.gpu_group import exchange_shape
from baton.engine.memory.kv_cache import KVCache
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import weight_bytes
from baton.engine.shared_memory.step_shape import StepShape
from baton.model_spec.layout import FP8
from baton.model_spec.split import splits
from services.common.config.worker import EngineConfig, WorkerConfig
from services.worker.engine.assembly import device_group
from services.worker.engine.startup.memory_plan import (
    CPU_KV_BYTES,
    Gpu,
    MemoryPlan,
    MemoryPlanner,
    draft_bytes,
    exchange_bytes,
    other_bytes,
    plan_devices,
)

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
H100 = Gpu("GPU 0", 85_000_000_000, 84_000_000_000)
WEIGHTS = 16_060_522_496  # in bfloat16
BLOCK = 8 * 2**20  # of 64 tokens

Plan = Callable[..., int]
Whole = Callable[..., MemoryPlan]


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return load_config(tmp_path)


@pytest.fixture
def whole(config: ModelConfig) -> Whole:
    def planned(
        gpu: Gpu | None = H100, max_context: int = 131_072, weights: int = WEIGHTS, **settings: Any
    ) -> MemoryPlan:
        engine = EngineConfig(**settings)
        layout = config.layout(engine.block_tokens_on("cuda" if gpu else "cpu"), "bfloat16")
        return MemoryPlanner(config, engine, layout, max_context, weights, gpu).plan()

    return planned


@pytest.fixture
def plan(whole: Whole) -> Plan:
    return lambda *args, **settings: whole(*args, **settings).kv_blocks


def test_kv_blocks_fill_the_share_of_a_single_worker(config: ModelConfig, plan: Plan) -> None:
    left = 0.9 * H100.total_bytes - WEIGHTS - other_bytes(config, EngineConfig(), StepShape(256))
    assert plan(slots=256) == left // BLOCK
    assert plan(slots=256) > 6800  # 435,000 tokens


@pytest.mark.parametrize(("head_dim", "share"), [(128, 130 / 256), (64, 66 / 128), (256, 258 / 512)])
def test_fp8_takes_half_the_memory_of_16_bits(config: ModelConfig, head_dim: int, share: float) -> None:
    config = replace(config, head_dim=head_dim)
    engine = EngineConfig(slots=256)
    counts, sizes = [], []
    for name in ("bfloat16", FP8):
        layout = config.layout(64, name)
        planner = MemoryPlanner(config, engine, layout, 131_072, WEIGHTS, H100)
        counts.append(planner.plan().kv_blocks)
        sizes.append(sum(group.block_bytes for group in layout.groups))
        assert KVCache(layout, 2, "cpu").storage[0].shape == (2, sizes[-1])
    assert sizes[1] == sizes[0] * share <= 0.52 * sizes[0]
    assert counts[1] == pytest.approx(counts[0] / share, abs=2)


def planner_of(config: ModelConfig, gpu: Gpu, **settings: Any) -> MemoryPlanner:
    """The planner of a rank's part of the 8B, in bfloat16."""
    weights = weight_bytes(config, torch.bfloat16)
    layout = config.layout(64, "bfloat16")
    return MemoryPlanner(config, EngineConfig(**settings), layout, 131_072, weights, gpu)


def test_several_devices_have_as_many_blocks_as_the_one_with_the_least_room(config: ModelConfig) -> None:
    small = Gpu("GPU 1", 40_000_000_000, 39_000_000_000)
    parts = [config.of_rank(split) for split in splits(2)]
    alone = [planner_of(part, gpu).plan() for part, gpu in zip(parts, (H100, small), strict=True)]
    both = plan_devices([planner_of(part, gpu) for part, gpu in zip(parts, (H100, small), strict=True)])
    assert both == alone[1]
    assert both.kv_blocks < alone[0].kv_blocks
    # A block of a rank has half the heads, and the exchange and the embedding are all that both have.
    equal = plan_devices([planner_of(part, H100, slots=256) for part in parts])
    shape = StepShape(256)
    other = other_bytes(parts[0], EngineConfig(), shape)
    other += exchange_bytes(parts[0], EngineConfig(), shape, EngineConfig().chunk_tokens_on("cuda"))
    other += 4 * BLOCK  # staging for whole blocks
    weights = weight_bytes(parts[0], torch.bfloat16)
    assert WEIGHTS / 2 < weights < WEIGHTS / 2 + 128256 * 4096 * 2
    assert equal.kv_blocks == (0.9 * H100.total_bytes - weights - other) // (BLOCK // 2)
    assert equal.kv_blocks > 2 * 6800


def test_kernels_that_are_all_loaded_take_memory_of_kv_blocks(config: ModelConfig) -> None:
    """Kernels of one device take memory of both, which have as many blocks as the one with the least room."""
    parts = [config.of_rank(split) for split in splits(2)]
    planners = [planner_of(part, H100, slots=256) for part in parts]
    taken = 3 * BLOCK // 2
    loaded = [planners[0], replace(planners[1], kernel_bytes=taken)]
    assert plan_devices(planners).kv_blocks - plan_devices(loaded).kv_blocks == 3
    short = replace(planners[1], kernel_bytes=H100.total_bytes)
    with pytest.raises(BatonError, match="the model does not fit"):
        plan_devices([planners[0], short])


def test_slots_that_one_device_has_no_room_for_no_device_has(config: ModelConfig) -> None:
    parts = [config.of_rank(split) for split in splits(2)]
    small = Gpu("GPU 1", 16_000_000_000, 15_000_000_000)
    both = plan_devices([planner_of(part, gpu) for part, gpu in zip(parts, (H100, small), strict=True)])
    assert both.slots == planner_of(parts[1], small).plan().slots < planner_of(parts[0], H100).plan().slots


def test_one_device_exchanges_nothing(config: ModelConfig) -> None:
    engine, shape = EngineConfig(), StepShape(64)
    assert exchange_bytes(config, engine, shape, 2048) == 0
    rows = 2048 + 64
    part = config.of_rank(splits(2)[1])
    assert 3 * rows * 4096 * 2 < exchange_bytes(part, engine, shape, 2048) < 3.2 * rows * 4096 * 2


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("slots", "rows_per_slot", "chunk"), [(64, 1, 2048), (16, 8, 2048), (256, 1, 100)])
def test_the_exchange_has_room_for_rows_that_pad_a_prompt(
    config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    rows_per_slot: int,
    chunk: int,
    mixed: bool,
) -> None:
    part, shape = config.of_rank(splits(2)[0]), StepShape(slots, rows_per_slot)
    first: Any = SimpleNamespace(config=part, precision=SimpleNamespace(activations=torch.bfloat16))

    def allocated(models: list[Any], rows: int, prompt_rows: int, _: float) -> int:
        return exchange_shape(first, len(models), rows, prompt_rows).arena_bytes

    monkeypatch.setattr("baton.engine.decode.gpu_group.gpu_group", allocated)
    worker = WorkerConfig(name="a", role="both", model="m", engine=EngineConfig(mixed_steps=mixed))
    model: Any = SimpleNamespace(
        ranks=[first] * 2, device=torch.device("cuda"), exact=False, chunk_tokens=chunk
    )
    planned = exchange_bytes(part, worker.engine, shape, chunk)
    taken: Any = device_group(worker, model, shape, mixes=mixed)
    assert taken <= planned < 1.01 * taken


def test_weights_and_buffers_come_out_of_each_workers_share(config: ModelConfig, plan: Plan) -> None:
    fixed = WEIGHTS + other_bytes(config, EngineConfig(), StepShape(128))
    both = 2 * (fixed + plan(gpu_workers=2) * BLOCK)
    assert 0.9 * H100.total_bytes - 2 * BLOCK < both <= 0.9 * H100.total_bytes
    assert plan(gpu_memory=0.45) == plan(gpu_workers=2)


LINK = 256 * 2**20


def test_link_staging_is_set_aside(plan: Plan) -> None:
    """Each takes 256 MiB, of a window on one side and of staging on the other."""
    alone = plan(slots=256)
    for links in (1, 3):
        assert alone - plan(slots=256, gpu_links=links) == links * LINK // BLOCK
    assert plan(slots=256, gpu_links=0) == alone


def test_configured_blocks_and_links_together_must_be_free(plan: Plan) -> None:
    kv_blocks = 1000
    free = Gpu("GPU 0", H100.total_bytes, WEIGHTS + kv_blocks * BLOCK + 2 * LINK)
    assert plan(free, kv_blocks=kv_blocks, gpu_links=2) == kv_blocks
    with pytest.raises(BatonError, match=r"0\.805 GB for links, and KV blocks") as caught:
        plan(free, kv_blocks=kv_blocks, gpu_links=3)
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert plan(None, gpu_links=3) == plan(None)  # a CPU's windows are the host's


def test_other_memory_is_bounded_at_256_slots(config: ModelConfig) -> None:
    alone = other_bytes(config, EngineConfig(mixed_steps=False), StepShape(256))
    assert alone <= 2_500_000_000
    assert other_bytes(config, EngineConfig(), StepShape(256)) - alone <= 100_000_000, (
        "rows that join prefill steps"
    )


def test_buffers_of_decode_steps_are_by_rows_and_not_by_slots(config: ModelConfig) -> None:
    apart = EngineConfig(mixed_steps=False)
    for slots, rows in ((64, 4), (64, 8), (256, 8)):
        shapes = StepShape(slots, rows), StepShape(256)
        assert len({other_bytes(config, apart, shape) for shape in shapes}) == 1
    assert other_bytes(config, apart, StepShape(64, 2)) == other_bytes(config, apart, StepShape(128))


def test_rows_that_join_prefill_steps_have_no_drafts(config: ModelConfig) -> None:
    def joined(shape: StepShape) -> int:
        mixed, apart = (
            other_bytes(config, EngineConfig(mixed_steps=mixed), shape) for mixed in (True, False)
        )
        return mixed - apart

    assert joined(StepShape(64, 4)) == joined(StepShape(64))


def test_histories_and_drafts_take_memory_of_kv_blocks(plan: Plan) -> None:
    """4 bytes a token of the shorter of context and lookup, 44 bytes a slot, and partial sums of 371
    items."""
    off = plan(slots=256)
    for lookup, context in ((131_072, 131_072), (131_072, 65_536), (65_536, 131_072)):
        on = plan(slots=256, speculation="lookup", lookup_tokens=lookup, max_context=context)
        taken = 256 * (4 * min(lookup, context) + 44) + 371 * 8 * 32 * 130 * 4
        assert off - on == pytest.approx(taken / BLOCK, abs=1)
        assert taken > 7 * BLOCK


def test_a_lookahead_table_takes_memory_of_kv_blocks(plan: Plan) -> None:
    off, on = plan(slots=64), plan(slots=64, speculation="lookup")
    assert plan(slots=64, speculation="lookup", lookahead_table_mb=1000) - on == pytest.approx(
        -(10**9) / BLOCK, abs=1
    )
    assert plan(slots=64, lookahead_table_mb=1000) == off, "without drafts there is none"


def test_a_lookahead_table_larger_than_what_is_left_is_refused(plan: Plan) -> None:
    """Rather than drafts are given up for it."""
    for settings, message in (
        ({}, r"engine.lookahead_table_mb of 70 GB does not fit: 5\d.\d GB of this worker's 76.5 GB of GPU 0"),
        ({"kv_blocks": 9}, "a lookahead table of 70 GB and KV blocks of .* do not fit on GPU 0"),
    ):
        with pytest.raises(BatonError, match=message) as refused:
            plan(speculation="auto", lookahead_table_mb=70_000, **settings)
        assert refused.value.kind is ErrorKind.INVALID
        assert "\n" not in refused.value.message


def test_drafts_are_given_up_before_slots(whole: Whole, config: ModelConfig) -> None:
    """On a GPU whose share leaves little beside the weights and the blocks of 32 typical sequences."""
    needed = 32 * 16 * BLOCK + WEIGHTS
    for drafts in (0, 3, 7):
        engine = EngineConfig(speculation="lookup")
        other = other_bytes(config, engine, StepShape(32, 1 + drafts))
        layout = config.layout(64, "bfloat16")
        other += draft_bytes(config, engine, layout, StepShape(32, 1 + drafts), 131_072)
        gpu = Gpu("GPU 0", int((needed + other + BLOCK) / 0.9) + 1, 84_000_000_000)
        made = whole(gpu, speculation="lookup", gpu_links=0)
        assert (made.slots, made.rows_per_slot) == (32, 1 + drafts)
    assert whole(slots=64, speculation="lookup", draft_tokens=3).rows_per_slot == 4
    assert whole(None, speculation="lookup").rows_per_slot == 8


def test_quantised_weights_take_a_matrix_at_full_width_beside(config: ModelConfig) -> None:
    full, fp8 = (
        other_bytes(config, EngineConfig(quantization=name), StepShape(64)) for name in (None, "fp8")
    )
    assert fp8 - full == 2 * 28672 * 4096


@pytest.mark.parametrize(("name", "more"), [("fp8", 0), ("int8", 0), ("int4", 2 * (128256 - 28672) * 4096)])
def test_a_head_in_int4_is_the_widest_matrix_at_full_width(
    config: ModelConfig, name: Literal["fp8", "int8", "int4"], more: int
) -> None:
    without, with_head = (
        other_bytes(config, EngineConfig(quantization=name, quantize_head=head), StepShape(64))
        for head in (False, True)
    )
    assert with_head - without == more


@pytest.mark.parametrize(
    ("name", "head", "share"),
    [
        ("fp8", False, 0.565),
        ("int8", False, 0.565),
        ("int4", False, 0.361),
        ("fp8", True, 0.533),
        ("int4", True, 0.313),
    ],
)
def test_bytes_of_the_whole_model(config: ModelConfig, name: str, head: bool, share: float) -> None:
    """Embedding and norms stay as they are, and the head where nothing else is said."""
    whole = weight_bytes(config, torch.bfloat16)
    quantized = weight_bytes(config, torch.bfloat16, weight_formats(config, name, quantize_head=head))
    assert quantized / whole == pytest.approx(share, rel=0.01)


def test_a_tied_head_in_fewer_bits_takes_memory_beside_the_embedding(config: ModelConfig) -> None:
    tied = replace(config, tied_head=True)
    plain, more = (weight_formats(tied, "fp8", quantize_head=head) for head in (False, True))
    added = weight_bytes(tied, torch.bfloat16, more) - weight_bytes(tied, torch.bfloat16, plain)
    assert added == 128256 * (4096 + 4)


def test_no_more_blocks_than_all_slots_can_use(plan: Plan) -> None:
    assert plan(slots=2, max_context=640) == 2 * 10 + 1
    assert plan(slots=2, max_context=641) == 2 * 11 + 1
    assert plan(slots=2, max_context=640, kv_blocks=1000) == 1000  # unless configured


def test_a_share_too_small_for_the_model_is_refused(plan: Plan) -> None:
    with pytest.raises(BatonError) as caught:
        plan(gpu_workers=5)
    assert caught.value.kind is ErrorKind.INVALID
    for figure in ("0.9 of GPU 0's 85 GB", "shared by 5 workers", "15.3 GB", "16.1 GB"):
        assert figure in caught.value.message
    assert "\n" not in caught.value.message


def test_memory_in_use_by_others_is_unavailable(plan: Plan) -> None:
    busy = Gpu("GPU 0", H100.total_bytes, 30_000_000_000)
    with pytest.raises(BatonError, match=r"30 GB of 85 GB are free") as caught:
        plan(busy)
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert plan(busy, gpu_workers=3) > 2  # what it takes is free
    with pytest.raises(BatonError, match="do not fit") as caught:
        plan(kv_blocks=10_000)
    assert caught.value.kind is ErrorKind.INVALID  # not even on an empty one


def test_configured_memory_applies_to_both_devices(plan: Plan) -> None:
    assert plan(kv_memory_mb=840) == 840_000_000 // BLOCK
    assert plan(None, kv_memory_mb=840) == 840_000_000 // (BLOCK // 4)
    with pytest.raises(BatonError, match="kv_memory_mb"):
        plan(kv_memory_mb=16)


def test_cpu_defaults(plan: Plan) -> None:
    assert plan(None) == CPU_KV_BYTES // (BLOCK // 4)
    engine = EngineConfig()
    assert (engine.block_tokens_on("cuda"), engine.block_tokens_on("cpu")) == (64, 16)
    assert EngineConfig(block_tokens=8).block_tokens_on("cuda") == 8


def test_placement_sets_the_number_of_sharing_workers_unless_configured() -> None:
    worker = WorkerConfig(name="a", role="both", model="m")
    placed = worker.on_gpus((1,), 3).engine
    assert (placed.device_indexes, placed.gpu_workers) == ((1,), 3)
    reported = WorkerConfig(name="a", role="both", model="m", engine=EngineConfig(gpu_workers=2))
    assert reported.on_gpus((), 3).engine.gpu_workers == 2


def test_slots_of_a_gpu_fit_typical_sequences(whole: Whole) -> None:
    """An 8B model: an H100 alone and shared, and smaller cards whose KV cache holds far fewer sequences."""
    assert whole().slots == 256
    assert whole(gpu_workers=2).slots == 128  # 22 GB each, 163,000 tokens
    assert whole(gpu_memory=0.3).slots == 48  # 59,000 tokens
    a10 = Gpu("GPU 0", 24_000_000_000, 23_500_000_000)
    assert whole(a10).slots == 24  # 30,000 tokens
    for plan in (whole(), whole(gpu_workers=2), whole(gpu_memory=0.3), whole(a10)):
        assert (plan.kv_blocks - 1) * 64 >= plan.slots * 1024
    assert whole(Gpu("GPU 0", 20_500_000_000, 20_000_000_000)).slots == 16, "never fewer"


def test_slots_follow_a_short_context_and_configured_blocks(whole: Whole) -> None:
    assert whole(kv_blocks=1 + 64 * 16).slots == 64
    assert whole(kv_blocks=64 * 16).slots == 48, "one block is scratch"
    assert whole(kv_blocks=1 + 64 * 16, max_context=256).slots == 256
    assert whole(kv_memory_mb=840).slots == 16


def test_slots_as_configured_and_on_a_cpu(whole: Whole) -> None:
    assert whole(slots=3).slots == 3
    assert whole(slots=1000).slots == 1000
    assert whole(None).slots == 16
    assert whole(None, slots=40).slots == 40
    assert (EngineConfig().most_slots, EngineConfig(slots=1000).most_slots) == (256, 1000)
