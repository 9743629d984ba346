"""The prefix cache of a stepped engine: the same tokens whatever was found, no block leaked."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest

from baton.engine.prefix_cache.host_store import HostBlockStore
from baton.v1.worker_pb2 import GetAuditRequest, PrefixCacheReport
from services.worker.engine.startup import prefix_cache_setup
from tests.support.waiting import block_until
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

BLOCK = 4


NUMBERS = itertools.count(1)


def ask(stepped: SteppedEngine, prompt: list[int], most: int = 4, tenant: str = "") -> tuple[list[int], int]:
    """The tokens of a request, and how many tokens of its prompt were cached."""
    name = next(NUMBERS).to_bytes(2, "little")
    asked = reserve(name=name, tokens=len(prompt), most=most)
    asked.tenant = tenant
    ticket = stepped.ask(reserve=asked).reserved.ticket
    command = prefill(ticket, name=name, tokens=len(prompt), most=most, tenant=tenant)
    command.token_ids[:] = prompt
    number = stepped.send(prefill=command)
    stepped.records.clear()
    # The prompt may wait for a disk, and kernels in the interpreter take seconds.
    block_until(lambda: "prefill_ended" in stepped.of(number), 120, stepped.run_out)
    stepped.run_out()
    first = next(e for e in stepped.events if e.id == number and e.prefill.HasField("first_token"))
    return [r.token for r in stepped.records if r.has_token], first.prefill.first_token.cached_tokens


def report(stepped: SteppedEngine) -> PrefixCacheReport:
    return stepped.ask(report=GetAuditRequest()).report.prefixes


@pytest.mark.parametrize("chunk", [3, pytest.param(8, marks=pytest.mark.slow), 64])
def test_tokens_are_the_same_around_every_boundary(tmp_path: Path, truth: SteppedEngine, chunk: int) -> None:
    stepped = SteppedEngine(tmp_path, chunk_tokens=chunk)
    prompt = [(7 * i) % 60 + 3 for i in range(40)]
    # Every remainder of a block, before and behind boundaries of blocks and of chunks.
    for shared in (*range(1, 2 * BLOCK + 2), 15, 16, 17):
        tokens = prompt[:shared] + [(11 * i + shared) % 60 + 3 for i in range(5)]
        wanted, none = ask(truth, tokens)
        assert none == 0
        first, _ = ask(stepped, tokens)
        again, cached = ask(stepped, tokens)
        assert first == again == wanted
        assert cached == (len(tokens) - 1) // BLOCK * BLOCK
        stepped.assert_free()
    stepped.close()


def turn_while_the_disk_works(stepped: SteppedEngine) -> None:
    """Lets the disk finish what it has been given."""
    for _ in range(200):
        stepped.turn()
        time.sleep(0.001)


def conversation(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 60) for _ in range(length)]


@pytest.mark.parametrize(
    ("disk", "chunk"),
    [
        (False, 64),
        (True, 64),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 3), (True, 3))),
    ],
)
def test_evicted_blocks_come_back_from_the_tiers_behind(
    tmp_path: Path, truth: SteppedEngine, monkeypatch: pytest.MonkeyPatch, chunk: int, disk: bool
) -> None:
    """32 blocks on the device and five prompts of ten: each evicts earlier ones."""
    block_bytes = truth.ask(report=GetAuditRequest()).report.block_bytes[0]
    folder = str(tmp_path / "disk") if disk else None
    if disk:  # little more than a prompt needs, so that later blocks evict it to the disk
        room = 12 * block_bytes
        monkeypatch.setattr(
            prefix_cache_setup, "HostBlockStore", lambda cache, _, disk: HostBlockStore(cache, room, disk)
        )
    stepped = SteppedEngine(tmp_path, chunk_tokens=chunk, prefix_host_mb=1, prefix_disk_dir=folder)
    prompts = [conversation(40 + seed % 3, seed) for seed in range(5)]
    for _ in range(3):
        for prompt in prompts:
            wanted, _ = ask(truth, prompt)
            assert ask(stepped, prompt)[0] == wanted
            stepped.assert_free()
            if disk:
                turn_while_the_disk_works(stepped)
    found = report(stepped)
    assert found.evicted_blocks > 0
    assert (found.disk_hits if disk else found.host_hits) > 0
    assert found.disk_corrupt == 0
    stepped.close()
