"""Memory is flat over thousands of requests: what torch has allocated, what the GPU has given away, and the
process on the host. Requests of every kind come and go, grow, are set aside and are cancelled."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.worker.engine.decode import block_allocation
from tests.engine.crowd import Crowd
from tests.engine.local_engine import LocalEngine
from tests.engine.test_gpu_requests import Size, random_requests
from tests.support.flatness import Flat, Sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Load:
    """`rounds` rounds of requests, after `warm_up` such rounds."""

    size: Size
    warm_up: int
    rounds: int
    flat: Flat


# A few hundred requests show no slope, only a leak of whole blocks.
REDUCED = Load(Size(40, 6, 22, 16, 12, 4, graph=False), 2, 3, Flat(kib_a_request=20, growth=0.05))
FULL = Load(Size(500, 64, 300, 24, 16, 4, graph=True), 3, 20, Flat())


def resident_kib() -> int:
    """Memory that the process has allocated and touched; pages of files, as of libraries, come and go."""
    status = Path("/proc/self/status").read_text()
    return sum(int(status.partition(f"{kind}:")[2].split()[0]) for kind in ("RssAnon", "RssShmem"))


def measured(device: str) -> dict[str, int]:
    """Memory in KiB by kind, with nothing running: the host's, and a GPU's that no other process uses."""
    found = {"host": resident_kib()}
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated": torch.cuda.memory_allocated() // 1024, "given away": (total - free) // 1024}
    return found


def prove(folder: Path, load: Load) -> str:
    size, draw = load.size, random.Random(8)
    device = DEVICE if size.graph else "cpu"
    engine = LocalEngine(
        folder / "model", slots=size.slots, blocks=size.blocks, device=device, graph=size.graph, chunk=256
    )
    crowd = Crowd(engine, reserve=size.reserve, host_blocks=4 * size.blocks)
    samples: dict[str, list[Sample]] = {}
    tokens = cancelled = 0
    for number in range(-load.warm_up, load.rounds + 1):
        for name, kib in measured(device).items() if number >= 0 else ():
            samples.setdefault(name, []).append(Sample(number * size.requests, kib))
        if number == load.rounds:
            break
        answers = crowd.run(random_requests(draw, size), draw, join=0.95)
        tokens += sum(len(answer.tokens) for answer in answers)
        cancelled += crowd.counts(answers).cancelled
    counts = crowd.counts([])
    crowd.assert_all_free()
    assert counts.swapped_out > load.rounds
    assert cancelled > load.rounds
    for name, mine in samples.items():
        assert not load.flat.broken_by(mine), (name, mine)
    reported = ", ".join(f"{name} {mine[0].kib} to {mine[-1].kib} KiB" for name, mine in samples.items())
    done = load.rounds * size.requests
    return (
        f"{done} requests, {tokens} tokens, {counts.swapped_out} swapped, {counts.allocations} allocations,"
        f" {cancelled} cancelled: {reported}"
    )


@pytest.fixture(autouse=True)
def _small_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 4)


def test_flat_over_some_requests(tmp_path: Path) -> None:
    print(prove(tmp_path, REDUCED))


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.slow
def test_flat_over_ten_thousand_requests_on_a_gpu(tmp_path: Path) -> None:
    print(f"\nPROOF memory: {prove(tmp_path, FULL)}")
