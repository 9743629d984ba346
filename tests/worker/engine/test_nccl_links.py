"""Engines with links over a double of NCCL: the same tokens, and an engine whose NCCL hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.base.errors import BatonError, ErrorKind
from services.common.config.transfer import TransferConfig, Transport
from services.common.config.worker import EngineConfig, WorkerConfig
from services.worker.engine.startup.link_setup import check_transport, nccl_links
from tests.kvtransfer.support.nccl_transport import WatchedEndpoint
from tests.worker.engine.engine_pair import Pair
from tests.worker.engine.stepped_engine import SteppedEngine
from tests.worker.engine.test_device_links import words
from tests.worker.engine.test_prefix_cache import ask


@pytest.fixture
def made(truth: SteppedEngine, nccl_doubles: list[WatchedEndpoint]) -> list[WatchedEndpoint]:
    """The NCCL links of the engines, in the order of their starts. `truth` was made before: its blocks are
    the host's."""
    return nccl_doubles


def pair_over(folder: Path, transport: Transport) -> Pair:
    return Pair(folder, source={"transport": transport}, transport=transport)


@pytest.fixture
def ways(tmp_path: Path, made: list[WatchedEndpoint], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """NCCL first, and grpc for when it falls."""
    monkeypatch.setattr("kvtransfer.transports.registry.AUTO", ("nccl", "grpc"))
    pair = pair_over(tmp_path, "auto")
    yield pair
    for links in made:
        links.double.hangs.clear()
    pair.close()


def transports(pair: Pair) -> list[str]:
    return [link.transport for link in pair.source.engine.prefill.sender.links]


def restart_reasons(engine: SteppedEngine) -> list[str]:
    return [event.restart_needed.reason for event in engine.events if event.HasField("restart_needed")]


def test_prompts_are_sent_over_nccl_where_configured(
    tmp_path: Path, truth: SteppedEngine, made: list[WatchedEndpoint]
) -> None:
    pair = pair_over(tmp_path, "nccl")
    for length in (1, 5, 16, 30):
        prompt = words(length, seed=length)
        assert pair.generate(prompt)[0] == ask(truth, prompt)[0]
        pair.assert_free()
    assert transports(pair) == ["nccl"]
    assert sum(len(links.channels) for links in made) == 2
    assert pair.report().bytes_received == pair.source.engine.prefill.sender.counters.bytes_shipped > 0
    assert restart_reasons(pair.source) == restart_reasons(pair.target) == []
    pair.close()


def test_codes_and_scales_are_sent_over_nccl(
    tmp_path: Path, quantised: SteppedEngine, made: list[WatchedEndpoint]
) -> None:
    pair = Pair(tmp_path, source={"transport": "nccl", "kv_dtype": "fp8"}, transport="nccl", kv_dtype="fp8")
    for length in (5, 30):
        prompt = words(length, seed=length)
        assert pair.generate(prompt, most=12)[0] == ask(quantised, prompt, most=12)[0]
        pair.assert_free()
    assert transports(pair) == ["nccl"]
    pair.close()


@pytest.mark.parametrize("end", ["source", "target"])
def test_an_engine_whose_nccl_hangs_reports_it_once_and_continues(
    ways: Pair, truth: SteppedEngine, made: list[WatchedEndpoint], end: str
) -> None:
    """The channel of its link is aborted, and the abort does not return; later transfers use the next
    transport."""
    assert ways.generate(words(9, 1))[0] == ask(truth, words(9, 1))[0]
    assert transports(ways) == ["nccl"]
    engine, links = getattr(ways, end), made[0 if end == "source" else 1]
    links.double.hangs.set()
    links.channels[0].abort("by the test")
    # A request that comes before the sender notices loses an attempt.
    ways.run_until(lambda: bool(restart_reasons(engine)) and not transports(ways))
    for seed in (2, 3):
        assert ways.generate(words(16, seed))[0] == ask(truth, words(16, seed))[0]
    assert transports(ways) == ["grpc"]
    time.sleep(0.15)
    engine.turn(3)
    assert restart_reasons(engine) == ["NCCL did not end a link in time"]
    ways.run_until(lambda: not any(link.live_transfers for link in ways.source.engine.prefill.sender.links))
    ways.assert_free()


def worker(device: str = "cpu", transport: Transport = "nccl") -> WorkerConfig:
    return WorkerConfig(
        name="a",
        role="decode",
        model="m",
        engine=EngineConfig.model_validate({"device": device}),
        transfer=TransferConfig(transport=transport),
    )


def test_nccl_without_a_gpu_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(BatonError, match="transport nccl: it connects GPUs") as error:
        check_transport(worker())
    assert error.value.kind is ErrorKind.INVALID
    for transport in ("auto", "ipc", "grpc"):
        check_transport(worker(transport=transport))


def test_nccl_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise RuntimeError("this machine has no libnccl.so.2")

    monkeypatch.setattr(
        "services.worker.engine.startup.link_setup.device_of", lambda engine: torch.device("cuda", 0)
    )
    monkeypatch.setattr("services.worker.engine.startup.link_setup.Nccl", no_library)
    with pytest.raises(BatonError, match=r"transport nccl: this machine has no libnccl\.so\.2") as error:
        check_transport(worker("auto"))
    assert error.value.kind is ErrorKind.INVALID


def test_nccl_is_required_only_where_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl_links(None, "auto") is None
    assert nccl_links(None, "ipc") is None
    with pytest.raises(BatonError, match="cannot be moved"):
        nccl_links(None, "nccl")
    monkeypatch.setattr("kvtransfer.transports.registry.AUTO", ("ipc", "nccl", "grpc"))
    assert nccl_links(None, "auto") is None
