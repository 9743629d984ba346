"""Workers of several devices: blocks go from any split to any other, and the tokens stay the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.prefix_cache.host_store import HostBlockStore
from services.worker.engine.startup import model_loader, prefix_cache_setup
from tests.engine.local_engine import CONFIG
from tests.worker.engine.engine_pair import BLOCK, Pair
from tests.worker.engine.stepped_engine import SteppedEngine
from tests.worker.engine.test_prefix_cache import ask, report, turn_while_the_disk_works
from tests.worker.engine.test_quantised_cache import words

FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 97}
WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 12,
    "max_window_layers": 1,
    "num_hidden_layers": 3,
}
SPLITS = [
    (1, 4),
    (4, 2),
    (2, 1),
    *(pytest.param(*split, marks=pytest.mark.slow) for split in ((1, 2), (2, 2))),
]
# A cache of codes, with one group or two, and caches of values.
CASES = ["windows-fp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "windows", "plain"))]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of engines that serve one model."""
    folder = tmp_path_factory.mktemp("model")
    changes = WINDOWS if "windows" in request.param else {}
    (folder / "config.json").write_text(json.dumps(CONFIG | FOUR_HEADS | changes))
    settings: dict[str, Any] = {"checkpoint": folder, "weights": "random"}
    return settings | ({"kv_dtype": "fp8"} if "fp8" in request.param else {})


@pytest.fixture(scope="module")
def alone(case: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedEngine]:
    """One engine of one device, without a prefix cache."""
    made = SteppedEngine(tmp_path_factory.mktemp("alone"), prefix_cache=False, **case)
    yield made
    made.close()


@pytest.mark.parametrize(("source", "target"), SPLITS)
def test_a_handoff_between_any_splits_changes_no_token(
    tmp_path: Path, case: dict[str, Any], alone: SteppedEngine, source: int, target: int
) -> None:
    settings = {"transport": "grpc" if source == 1 else "ipc", **case}
    with contextlib.closing(
        Pair(tmp_path, source={"tensor_parallel": source, **settings}, tensor_parallel=target, **settings)
    ) as pair:
        assert pair.source.model.fingerprint == pair.target.model.fingerprint == alone.model.fingerprint
        assert len(pair.target.model.ranks) == len(pair.target.model.cache.ranks) == target
        for length in (9, 23):
            prompt = words(length, seed=length)
            wanted = ask(alone, prompt, most=10)[0]
            for again in range(2):
                tokens, request = pair.generate(prompt, most=10)
                assert (tokens, request.resident) == (wanted, again * (length // BLOCK))
        sent = pair.source.engine.prefill.sender.counters
        groups = alone.model.layout.groups
        assert sent.bytes_shipped == sum(
            count * group.block_bytes for count, group in zip(sent.blocks_shipped, groups, strict=True)
        )
        pair.assert_free()


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_gpu_hands_over_to_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Prompts on one, decode steps by graphs on two; those of a second prompt that begins alike find its
    blocks there. In bfloat16 sums of two parts round otherwise, and tokens may differ behind the first."""
    monkeypatch.setattr(model_loader, "SEVERAL_GPUS", True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | FOUR_HEADS))
    settings: dict[str, Any] = {
        "checkpoint": tmp_path, "weights": "random", "device": "cuda", "dtype": dtype, "numerics": "exact",
    }  # fmt: skip
    alone = SteppedEngine(tmp_path, prefix_cache=False, **settings)
    with (
        contextlib.closing(alone),
        contextlib.closing(Pair(tmp_path, source=dict(settings), tensor_parallel=2, **settings)) as pair,
    ):
        assert [rank.device.index for rank in pair.target.model.ranks] == [0, 1]
        for length in (9, 23):
            prompt = words(length, seed=length)
            wanted = ask(alone, prompt, most=10)[0]
            for again in range(2):
                tokens, request = pair.generate(prompt, most=10)
                assert request.resident == again * (length // BLOCK)
                assert len(tokens) == len(wanted)
                assert tokens[:1] == wanted[:1]
                assert dtype == "bfloat16" or tokens == wanted
        pair.assert_free()


def block_bytes(engine: SteppedEngine) -> int:
    return sum(group.block_bytes for group in engine.model.layout.groups)


def test_tiers_hold_whole_blocks_that_any_split_reads(
    tmp_path: Path, case: dict[str, Any], alone: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that a worker of two devices evicted to its disk are read by one of one device."""
    tiers: dict[str, Any] = {"prefix_host_mb": 1, "prefix_disk_dir": str(tmp_path / "disk")}
    prompts = [words(40, seed=seed) for seed in range(3)]
    room = 10 * block_bytes(alone)
    monkeypatch.setattr(
        prefix_cache_setup, "HostBlockStore", lambda cache, _, disk: HostBlockStore(cache, room, disk)
    )
    for devices in (2, 1):
        folder = tmp_path / str(devices)
        folder.mkdir()
        engine = SteppedEngine(
            folder, "both", "their secret", tensor_parallel=devices, kv_blocks=14, **tiers, **case
        )
        for prompt in prompts:
            assert ask(engine, prompt)[0] == ask(alone, prompt)[0]
            turn_while_the_disk_works(engine)
        found = report(engine)
        assert (found.disk_hits > 4) == (devices != 2), found
        assert found.host_hits == found.disk_corrupt == 0
        engine.close()


@pytest.mark.slow
def test_a_swapped_out_sequence_goes_on(tmp_path: Path, case: dict[str, Any], alone: SteppedEngine) -> None:
    settings: dict[str, Any] = {"tensor_parallel": 2, **case}
    with contextlib.closing(
        Pair(tmp_path, source=settings, kv_blocks=25, reserve_output_tokens=4, host_kv_mb=1, **settings)
    ) as pair:
        requests = [pair.begin(pair.reserve(words(20, seed=seed), 60), 60) for seed in (9, 8)]
        pair.run_until(lambda: all(map(pair.ended, requests)))
        assert pair.report().sequences_swapped_out > 0
        for request in requests:
            assert pair.tokens(request) == ask(alone, request.prompt, most=60)[0]
        pair.assert_free()


def test_blocks_in_eight_bits_on_the_wire(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | FOUR_HEADS))
    settings: dict[str, Any] = {"kv_wire": "fp8", "checkpoint": tmp_path, "weights": "random"}
    found = []
    for source, target in ((1, 1), (4, 2)):
        with contextlib.closing(
            Pair(tmp_path, source={"tensor_parallel": source, **settings}, tensor_parallel=target, **settings)
        ) as pair:
            found.append(pair.generate(words(23), most=10)[0])
            sent = pair.source.engine.prefill.sender.counters
            rows = 2 * 2 * 4 * BLOCK  # layers, planes, heads, tokens
            assert sent.bytes_shipped == sent.blocks_shipped[0] * rows * (8 + 4)
    assert found[0] == found[1]
