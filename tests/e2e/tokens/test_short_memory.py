"""KV memory that is short: a large request is served, whatever small ones come after it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support.workers import loose_workers
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint

# 640 tokens of KV cache: more slots than memory for them.
ENGINE = {"dtype": "float64", "slots": 16, "kv_blocks": 41, "prefix_cache": False, "host_kv_mb": 0}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LARGE, SMALL = 480, 60
WAIT_S = 8.0


@pytest.mark.slow
async def test_a_large_request_is_not_starved_by_small_ones(tmp_path: Path) -> None:
    """The large request needs three quarters of the blocks, and from ten clients there is always a small one
    to take those that become free. It is served within its time in the queue, and the log is not filled by
    its refusals."""
    model = make_checkpoint(tmp_path, "qwen2", seed=8)
    router = {"queue_timeout_s": WAIT_S}
    with loose_workers(model, "prefill", "decode", engine=ENGINE, router=router) as loose:
        async with loose.cluster.stub() as stub:
            over = asyncio.Event()
            small = [asyncio.create_task(client(loose.cluster, stub, number, over)) for number in range(10)]
            await asyncio.sleep(1)
            logged = len(loose.cluster.log.read_text().splitlines())
            began = time.monotonic()
            prompt = [number % VOCAB_SIZE for number in range(LARGE)]
            try:
                await loose.cluster.generate(stub, prompt, max_tokens=20, **GREEDY)
            finally:
                waited = time.monotonic() - began
                over.set()
                served = await asyncio.gather(*small)
                lines = loose.cluster.log.read_text().splitlines()[logged:]
                print(f"large after {waited:.1f} s, small {sum(served)}, {len(lines)} log lines")
        assert min(served) > 0
        refusals = [line for line in lines if "refused" in line]
        assert len(refusals) <= 2, refusals[:5]


async def client(cluster: Any, stub: Any, number: int, over: asyncio.Event) -> int:
    """Asks one small request after the other; how many it was answered."""
    count = 0
    while not over.is_set():
        prompt = [(count * 31 + number * 7 + at) % VOCAB_SIZE for at in range(SMALL)]
        await cluster.generate(stub, prompt, max_tokens=60 + (number * 37 + count * 23) % 120, **GREEDY)
        count += 1
    return count
