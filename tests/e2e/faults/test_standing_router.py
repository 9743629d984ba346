"""A router's event loop stands still for longer than decode keeps outputs whose routers are gone.

What is injected: the loop sleeps for 18 s, in which all sequences end; gRPC's own threads answer pings, so
the router's streams stay open and fill up. Afterwards every token comes, of the first attempts.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from services.decode.output_streams import LINGER_S
from tests.e2e.support import sleepy_router
from tests.e2e.support.cluster import Answer, assert_all_free
from tests.e2e.support.workers import Loose, loose_workers
from tests.support.checkpoints import make_checkpoint

STREAMS, TOKENS = 8, 900
ENGINE = {"dtype": "float32", "numerics": "exact", "slots": STREAMS, "block_tokens": 16, "kv_blocks": 1000}


async def outputs(loose: Loose, *, standing: bool) -> list[Answer]:
    cluster = loose.cluster
    async with cluster.stub() as stub:
        asked = [
            asyncio.create_task(
                cluster.generate(
                    stub, range(3 + one, 9 + one), max_tokens=TOKENS, temperature=0, ignore_eos=True
                )
            )
            for one in range(STREAMS)
        ]
        if standing:
            await asyncio.sleep(0.5)
            cluster.process.send_signal(signal.SIGUSR1)
            began = time.monotonic()
            decode = loose.workers["decode-0"]
            await decode.until(lambda report: report.load.free_slots == STREAMS, sleepy_router.SLEEP_S)
            assert time.monotonic() - began < sleepy_router.SLEEP_S - LINGER_S - 1, "they ended too late"
        return await asyncio.gather(*asked)


@pytest.mark.slow
async def test_a_router_that_stands_still_receives_all_that_was_generated_meanwhile(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, seed=11, max_position_embeddings=1024)
    with loose_workers(
        model, "prefill", "decode", router_program=sleepy_router.PROGRAM, engine=ENGINE
    ) as loose:
        wanted = await outputs(loose, standing=False)
        came = await outputs(loose, standing=True)
        assert [one.token_ids for one in came] == [one.token_ids for one in wanted]
        assert all(one.last is not None and one.last.trace.attempts == 1 for one in came)
        await assert_all_free(loose.cluster, 10)
