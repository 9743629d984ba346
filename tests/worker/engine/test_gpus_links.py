"""Workers of one GPU, of two and of four hand over to each other over every transport: the tokens of one
GPU. To be run with CUDA_MODULE_LOADING=EAGER, as `make prove-gpus` does: engines of several devices have it.

In float32 sums of two parts hardly ever give other tokens than one device's; in fewer bits they may, behind
the first. A prompt that comes again finds its blocks at its decode worker, whatever split computed them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.prefix_cache.host_store import HostBlockStore
from services.common.config.transfer import Transport
from services.worker.engine.startup import prefix_cache_setup
from tests.engine.local_engine import CONFIG
from tests.support.four_gpus import NEEDS_FOUR
from tests.worker.engine.engine_pair import BLOCK, Pair
from tests.worker.engine.stepped_engine import SteppedEngine
from tests.worker.engine.test_prefix_cache import ask, report, turn_while_the_disk_works
from tests.worker.engine.test_quantised_cache import words
from tests.worker.engine.test_several_devices import FOUR_HEADS, WINDOWS

pytestmark = pytest.mark.multigpu

# Their first devices differ: NCCL connects no GPU with itself.
SENDERS = {1: (1,), 2: (1, 0), 4: (1, 0, 3, 2)}
RECEIVERS = {1: (0,), 2: (0, 1), 4: (0, 1, 2, 3)}
SPLITS = [
    (1, 2),
    (2, 1),
    (2, 2),
    pytest.param(1, 4, marks=NEEDS_FOUR, id="one-four"),
    pytest.param(4, 1, marks=NEEDS_FOUR, id="four-one"),
]


def settings_of(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG | FOUR_HEADS | WINDOWS))
    return {
        "checkpoint": folder, "weights": "random", "device": "cuda", "dtype": "float32", "numerics": "exact",
        "tune": "off", **more,
    }  # fmt: skip


def devices(count: int, where: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    return {"tensor_parallel": count, "device_indexes": where[count]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedEngine]:
    """An engine of one GPU in float32, without a prefix cache."""
    folder = tmp_path_factory.mktemp("alone")
    made = SteppedEngine(folder, prefix_cache=False, **settings_of(folder))
    yield made
    made.close()


@pytest.mark.parametrize(("source", "target"), SPLITS)
@pytest.mark.parametrize("transport", ["grpc", "ipc", "nccl"])
def test_handoffs_change_no_token(
    tmp_path: Path, alone: SteppedEngine, transport: Transport, source: int, target: int
) -> None:
    """The tokens in float32 are those of one GPU; a window's blocks, and others', go whole."""
    settings = settings_of(tmp_path, transport=transport)
    with contextlib.closing(
        Pair(
            tmp_path,
            source={**settings, **devices(source, SENDERS)},
            **settings,
            **devices(target, RECEIVERS),
        )
    ) as pair:
        assert [rank.device.index for rank in pair.target.model.ranks] == list(RECEIVERS[target])
        for length in (9, 23, 70):
            prompt = words(length, seed=length)
            wanted = ask(alone, prompt, most=10)[0]
            for again in range(2):
                tokens, request = pair.generate(prompt, most=10)
                assert (tokens, request.resident) == (wanted, again * (length // BLOCK))
        (link,) = pair.source.engine.prefill.sender.links
        assert link.transport == transport
        sent = pair.source.engine.prefill.sender.counters
        assert (
            pair.report().bytes_received
            == sent.bytes_shipped
            == sum(
                count * group.block_bytes
                for count, group in zip(sent.blocks_shipped, alone.model.layout.groups, strict=True)
            )
        )
        pair.assert_free()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_handoff_to_two_in_fewer_bits(tmp_path: Path, dtype: str) -> None:
    """The first token is that of the GPU that computed the prompt."""
    cache = {"kv_dtype": "fp8"} if dtype == "fp8" else {}
    numerics = "fast" if dtype == "fp8" else "exact"
    settings = settings_of(tmp_path) | {"dtype": "bfloat16", "numerics": numerics, **cache}
    alone = SteppedEngine(tmp_path, prefix_cache=False, **settings)
    with (
        contextlib.closing(alone),
        contextlib.closing(
            Pair(tmp_path, source=dict(settings), **settings, **devices(2, RECEIVERS))
        ) as pair,
    ):
        for length in (9, 23):
            prompt = words(length, seed=length)
            wanted = ask(alone, prompt, most=10)[0]
            for again in range(2):
                tokens, request = pair.generate(prompt, most=10)
                assert request.resident == again * (length // BLOCK)
                assert len(tokens) == len(wanted)
                assert tokens[:1] == wanted[:1]
        pair.assert_free()


def test_a_sequence_that_two_gpus_swapped_out_goes_on(tmp_path: Path, alone: SteppedEngine) -> None:
    settings = settings_of(tmp_path)
    pair = Pair(
        tmp_path, source=dict(settings), kv_blocks=25, reserve_output_tokens=4, host_kv_mb=1,
        **settings, **devices(2, RECEIVERS),
    )  # fmt: skip
    with contextlib.closing(pair):
        requests = [pair.begin(pair.reserve(words(20, seed=seed), 60), 60) for seed in (9, 8)]
        pair.run_until(lambda: all(map(pair.ended, requests)))
        assert pair.report().sequences_swapped_out > 0
        for request in requests:
            assert pair.tokens(request) == ask(alone, request.prompt, most=60)[0]
        pair.assert_free()


def test_tiers_of_two_gpus_are_read_by_one(
    tmp_path: Path, alone: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that a worker of two evicted to host memory and to its disk."""
    settings = settings_of(tmp_path)
    prompts = [words(40, seed=seed) for seed in range(3)]
    room = 10 * sum(group.block_bytes for group in alone.model.layout.groups)
    monkeypatch.setattr(
        prefix_cache_setup, "HostBlockStore", lambda cache, _, disk: HostBlockStore(cache, room, disk)
    )
    tiers: dict[str, Any] = {"prefix_host_mb": 1, "prefix_disk_dir": str(tmp_path / "disk")}
    for count in (2, 1):
        folder = tmp_path / str(count)
        folder.mkdir()
        engine = SteppedEngine(
            folder, "both", "their secret", kv_blocks=14, **tiers, **settings, **devices(count, RECEIVERS)
        )
        with contextlib.closing(engine):
            for prompt in prompts:
                assert ask(engine, prompt)[0] == ask(alone, prompt)[0]
                turn_while_the_disk_works(engine)
            found = report(engine)
            assert (found.disk_hits > 4) == (count == 1), found
            assert found.disk_corrupt == 0
