"""A KV cache in fp8 through engines: the same tokens whatever way the blocks went, since they are copied and
never quantised again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import ErrorKind
from baton.engine.shared_memory.output_ring import Finish
from services.common.config.transfer import TransferConfig, Transport
from services.common.config.worker import WorkerConfig
from tests.worker.engine.engine_pair import Pair
from tests.worker.engine.stepped_engine import SteppedEngine
from tests.worker.engine.test_prefix_cache import ask

FP8: dict[str, Any] = {"kv_dtype": "fp8"}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteppedEngine]:
    """One engine, without a prefix cache, that swaps nothing."""
    made = SteppedEngine(tmp_path_factory.mktemp("truth"), prefix_cache=False, **FP8)
    yield made
    made.close()


def fp8_pair(folder: Path, transport: Transport = "auto", **target: Any) -> Pair:
    return Pair(folder, source={"transport": transport, **FP8}, transport=transport, **FP8, **target)


def words(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 97) for _ in range(count)]


@pytest.mark.parametrize("transport", [pytest.param("grpc", marks=pytest.mark.slow), "ipc"])
def test_a_handoff_and_a_prefix_hit_change_no_token(
    tmp_path: Path, truth: SteppedEngine, transport: Transport
) -> None:
    pair = fp8_pair(tmp_path, transport)
    for length in (1, 4, 9, 23, 40):
        prompt = words(length, seed=length)
        wanted = ask(truth, prompt, most=12)[0]
        for again in range(2):
            tokens, request = pair.generate(prompt, most=12)
            assert (tokens, request.resident) == (wanted, again * (length // 4))
    sent = pair.source.engine.prefill.sender.counters
    assert sent.bytes_shipped == sum(sent.blocks_shipped) * pair.block_bytes > 0
    pair.assert_free()
    pair.close()


def test_an_unquantised_cache_gives_other_tokens(tmp_path: Path, truth: SteppedEngine) -> None:
    plain = SteppedEngine(tmp_path, prefix_cache=False)
    prompts = [words(30, seed=seed) for seed in range(6)]
    assert any(ask(plain, prompt, most=20)[0] != ask(truth, prompt, most=20)[0] for prompt in prompts)
    assert plain.model.fingerprint != truth.model.fingerprint
    plain.close()


@pytest.mark.parametrize(
    "host_kv_mb", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["preempted", "swapped"]
)
def test_sequences_without_blocks_go_on_with_the_same_tokens(
    tmp_path: Path, truth: SteppedEngine, host_kv_mb: int
) -> None:
    pair = fp8_pair(tmp_path, kv_blocks=25, reserve_output_tokens=4, host_kv_mb=host_kv_mb)
    prompts = [words(20, seed=9), words(20, seed=8)]
    requests = [pair.begin(pair.reserve(prompt, 60), 60) for prompt in prompts]
    pair.run_until(lambda: all(map(pair.ended, requests)))
    report = pair.report()
    counts = report.sequences_preempted > 0, report.sequences_swapped_out > 0
    assert counts == (not host_kv_mb, bool(host_kv_mb))
    for request in requests:
        tokens = pair.tokens(request)
        wanted = ask(truth, request.prompt, most=60)[0]
        assert tokens == wanted[: len(tokens)]
        if pair.finish(request) is Finish.PREEMPTED:  # the router continues it as another prompt
            longer = request.prompt + tokens
            rest = pair.generate(longer, most=60 - len(tokens))[0]
            assert rest == wanted[len(tokens) :]
    pair.assert_free()
    pair.close()


def test_evicted_prefixes_come_back_from_host_and_disk(tmp_path: Path, truth: SteppedEngine) -> None:
    tiers: dict[str, Any] = {
        "prefix_host_mb": 1,
        "prefix_disk_dir": str(tmp_path / "disk"),
        "prefix_disk_mb": 8,
    }
    stepped = SteppedEngine(tmp_path, kv_blocks=20, **tiers, **FP8)
    prompts = [words(40, seed=seed) for seed in range(4)]
    for _ in range(2):
        for prompt in prompts:
            assert ask(stepped, prompt)[0] == ask(truth, prompt)[0]
    hits = stepped.engine.decode.prefix_cache
    assert hits is not None
    assert hits.hit_blocks["host"] + hits.hit_blocks["disk"] > 10
    stepped.close()


def test_a_cache_is_quantised_at_most_once() -> None:
    engine: Any = {"kv_dtype": "fp8"}
    transfer = TransferConfig(kv_wire="int8")
    with pytest.raises(
        ValueError, match="kv_wire int8 is for a cache that kv_dtype fp8 does not quantise already"
    ):
        WorkerConfig(name="a", role="decode", model="m", engine=engine, transfer=transfer)


def test_workers_of_different_kv_formats_do_not_hand_over(tmp_path: Path) -> None:
    pair = Pair(tmp_path, **FP8)  # the source's cache is float32
    request = pair.begin(pair.reserve(words(9)))
    pair.run_until(lambda: pair.source.of(request.number)[-1:] == ["failed"])
    assert pair.failure(request) == (
        ErrorKind.CONFLICT,
        "the ticket's worker has another model or cache layout",
    )
    pair.close()
