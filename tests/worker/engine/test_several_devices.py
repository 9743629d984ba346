"""Workers of several devices: blocks go from any split to any other, and the tokens stay the same."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.device.shared_memory import SharedMemory
from baton.device.streams.link_device import Mapped
from baton.engine.prefix_cache.host_store import HostBlockStore
from baton.v1.engine_pb2 import CancelCommand
from kvtransfer.device.blocks import LinkBlocks
from services.common.config.transfer import TransferConfig
from services.worker.engine.startup import prefix_cache_setup
from services.worker.engine.startup.link_setup import link_blocks
from services.worker.engine.startup.model_loader import LoadedModel
from tests.engine.local_engine import CONFIG
from tests.kvtransfer.support.fake_device import FakeDevice, Pump
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
    (2, 1),
    # The second one is in LINKED, too.
    *(pytest.param(*split, marks=pytest.mark.slow) for split in ((1, 2), (4, 2), (2, 2))),
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


LINKED = [
    *((way, *split) for way, split in (("ipc", (2, 1)), ("nccl", (4, 2)))),
    *(
        pytest.param(way, *split, marks=pytest.mark.slow)
        for way in ("ipc", "nccl")
        for split in ((1, 4), (2, 1), (2, 2), (4, 2))
        if (way, split) not in {("ipc", (2, 1)), ("nccl", (4, 2))}
    ),
]


@pytest.mark.parametrize("lengths", [(1, 23), pytest.param((1, 9, 23, 30), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("way", "source", "target"), LINKED)
def test_devices_move_whole_blocks_between_any_splits(
    tmp_path: Path,
    case: dict[str, Any],
    alone: SteppedEngine,
    request: pytest.FixtureRequest,
    way: str,
    source: int,
    target: int,
    lengths: tuple[int, ...],
) -> None:
    """Blocks are moved by kernels of each end's first device, some iterations late, in the bytes of one
    device."""
    pump: Pump | None = None
    if way == "ipc":
        pump = request.getfixturevalue("pump")
    else:
        request.getfixturevalue("nccl_doubles")
    settings = {"transport": way, **case}
    with contextlib.closing(
        Pair(tmp_path, source={"tensor_parallel": source, **settings}, tensor_parallel=target, **settings)
    ) as pair:
        if pump is not None:
            pair.each_turn = pump.some
        for length in lengths:
            prompt = words(length, seed=length)
            wanted = ask(alone, prompt, most=10)[0]
            for again in range(2):
                tokens, asked = pair.generate(prompt, most=10)
                assert (tokens, asked.resident) == (wanted, again * (length // BLOCK))
                pair.assert_free()
        (link,) = pair.source.engine.prefill.sender.links
        assert link.transport == way
        assert pump is None or pump.steps > 0, "the devices have done it"
        sent = pair.source.engine.prefill.sender.counters
        groups = alone.model.layout.groups
        assert (
            pair.report().bytes_received
            == sent.bytes_shipped
            == sum(
                count * group.block_bytes for count, group in zip(sent.blocks_shipped, groups, strict=True)
            )
        )


def test_a_cancelled_request_leaves_blocks_that_no_device_writes(
    tmp_path: Path, case: dict[str, Any], alone: SteppedEngine, pump: Pump
) -> None:
    """The request's blocks are in other use at once, on all devices."""
    dice = random.Random(5)
    settings: dict[str, Any] = {"tensor_parallel": 2, **case}
    with contextlib.closing(Pair(tmp_path, source=settings, **settings)) as pair:
        pair.each_turn = pump.some
        for seed in range(6):
            cancelled = pair.begin(pair.reserve(words(30, seed), names=()))
            for _ in range(dice.randint(1, 9)):
                pair.source.play()
                pair.target.play()
            for end in (pair.target, pair.source)[: 1 + seed % 2]:
                end.ask(cancel=CancelCommand(attempt=cancelled.attempt))
            prompt = words(30, 100 + seed)
            assert pair.generate(prompt)[0] == ask(alone, prompt)[0]
            pair.run_until(lambda cancelled=cancelled: pair.ended(cancelled))  # type: ignore[misc]
            pair.run_until(lambda: pump.idle() and not pair.source.engine.prefill.sender.pinned_blocks)
            pair.run_until(lambda: not pair.target.receiving)
            pair.assert_free()


class Launching:
    """A lock that is held while steps are launched, and the threads that have held it."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        assert self._lock.acquire(timeout=10)
        self.threads.append(threading.current_thread().name)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Registering(FakeDevice):
    """Knows which threads held `launching` when they mapped memory."""

    def register(self, memory: SharedMemory) -> Mapped:
        assert isinstance(self.launching, Launching)
        assert self.launching.threads[-1] == threading.current_thread().name
        return super().register(memory)


def test_links_are_opened_between_launches_of_steps(
    tmp_path: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that maps memory may wait for a device, which may be waiting for the next launch."""
    held, names, pump = Launching(), iter(("fake:0", "fake:1")), Pump(None)

    def device_blocks(model: LoadedModel, transfer: TransferConfig) -> LinkBlocks:
        device = Registering(pump, next(names), ("fake:0", "fake:1"))
        device.launching = held
        return link_blocks(device, model.cache)

    monkeypatch.setattr("services.worker.engine.assembly.device_blocks", device_blocks)
    settings: dict[str, Any] = {"tensor_parallel": 2, **case}
    with contextlib.closing(Pair(tmp_path, source=settings, **settings)) as pair:
        pair.generate(words(9), most=10)
        here = threading.current_thread().name
        assert held.threads.count("link-open") == 1
        assert held.threads.count(here) >= 1 + pair.report().decode_steps
        before = len(held.threads)
    assert len(held.threads) == before + 1, "the link's memory is unmapped"


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
