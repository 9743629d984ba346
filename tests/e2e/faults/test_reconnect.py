"""A connection between router and worker is cut: sequences go on from where each stands.

What is cut is one TCP connection, while what was emitted is more than one gRPC message may hold. (A token
with 20 logprobs takes 229 bytes; the router's limit is scaled down from 32 MiB to 320 KiB, so that seconds
suffice.)
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.faults.interrupted import all_go_on, losses, right, streaming
from tests.e2e.faults.two_pairs.test_lost_workers import all_free
from tests.e2e.support import small_messages
from tests.e2e.support.workers import loose_workers
from tests.support.checkpoints import make_checkpoint

STREAMS, TOKENS = 16, 100
LOGPROBS, BYTES_PER_TOKEN = 20, 229


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=8)


@pytest.mark.slow
async def test_a_cut_connection_replays_nothing_that_was_received(model: Path) -> None:
    engine = {"dtype": "float64", "slots": STREAMS}
    with loose_workers(
        model, "prefill", "decode", proxied=True, router_program=small_messages.PROGRAM, engine=engine
    ) as loose:
        decode = loose.workers["decode-0"]
        assert decode.proxy is not None
        async with loose.cluster.stub() as stub:
            async with streaming(stub, STREAMS, TOKENS, seed="cut", logprobs=LOGPROBS) as streams:
                emitted = sum(len(stream.tokens) for stream in streams)
                assert emitted * BYTES_PER_TOKEN > small_messages.LIMIT_BYTES, "it all fits in one message"
                began, connections = time.monotonic(), decode.proxy.connections
                decode.proxy.cut()
                await all_go_on(streams, began + 0.1)
                gap = max(stream.longest_gap_s for stream in streams)
            await all_free(loose.workers.values(), 3.0)
        log = loose.cluster.log.read_text()
        reconnections, lost = decode.proxy.connections - connections, losses(loose)
    print(f"\nPROOF cut connection: {STREAMS} streams, {emitted} tokens, longest gap {gap:.2f} s")
    right(model, streams)
    assert reconnections == 1
    assert log.count("token_stream_broken") == 1
    assert lost == []
    assert gap < 2.5
