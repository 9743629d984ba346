"""Blocks of a finished chunk are sent while the next is computed: two stepped engines over a real link."""

from __future__ import annotations

import time
from pathlib import Path

from baton.v1.worker_pb2 import GetAuditRequest, IntegrityReport
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

CHUNK = 8
TOKENS = 60


def report(stepped: SteppedEngine) -> IntegrityReport:
    return stepped.ask(report=GetAuditRequest()).report


def test_blocks_arrive_before_the_prompt_is_computed(tmp_path: Path) -> None:
    """The blocks of the first n chunks have arrived before the next chunk is begun."""
    (tmp_path / "p").mkdir()
    (tmp_path / "d").mkdir()
    giving = SteppedEngine(tmp_path / "p", "prefill", chunk_tokens=CHUNK)
    taking = SteppedEngine(tmp_path / "d", "decode")
    reserved = taking.ask(reserve=reserve(tokens=TOKENS)).reserved
    giving.send(prefill=prefill(reserved.ticket, tokens=TOKENS))
    giving.turn()  # the first chunk, and the link is being opened
    prompts = giving.engine.prefill
    seen: list[tuple[int, int]] = []
    while (computed := prompts.steps.tokens_run) < TOKENS:
        # Only links are polled until the computed blocks have arrived; no step runs.
        whole = computed // 4  # its blocks have 4 tokens
        deadline = time.monotonic() + 5
        while taking.engine.decode.receiver is None or _received(taking) < whole:
            assert time.monotonic() < deadline, (computed, _received(taking))
            prompts.poll(16)
            taking.turn()
            time.sleep(0.001)
        seen.append((computed, _received(taking)))
        giving.turn()
    assert seen == [(computed, computed // 4) for computed in range(CHUNK, TOKENS, CHUNK)]
    assert report(taking).handoffs_committed == 0
    deadline = time.monotonic() + 5
    while not report(taking).handoffs_committed:
        assert time.monotonic() < deadline
        giving.turn()
    for stepped in (giving, taking):
        stepped.close()


def _received(stepped: SteppedEngine) -> int:
    receiver = stepped.engine.decode.receiver
    assert receiver is not None
    return sum(receiver.counters.blocks_received)
