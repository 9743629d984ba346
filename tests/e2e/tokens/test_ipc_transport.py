"""KV blocks through shared memory, which is what workers of one host take: the same tokens, and no byte of
them over a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import Cluster, assert_all_free
from tests.e2e.support.proc import tcp_sockets
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

LENGTHS = (1, 14, 47, 130, 300)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def test_the_same_tokens_through_shared_memory(cluster: Cluster, model: Path) -> None:
    prompts = [[(7 * at + 13 * length) % VOCAB_SIZE for at in range(length)] for length in LENGTHS]
    async with cluster.stub() as stub:
        await assert_all_free(cluster, 2.0)  # of those before, some left without taking all
        before = await cluster.reports()
        answers = await asyncio.gather(
            *(cluster.generate(stub, prompt, max_tokens=12, **GREEDY) for prompt in prompts)
        )
        await assert_all_free(cluster, 1.0)
        reports = await cluster.reports()
    reference = load_reference(model)
    for prompt, answer in zip(prompts, answers, strict=True):
        greedy_matches(reference, prompt, answer.token_ids)
    prefill, decode = reports["prefill-0"], reports["decode-0"]
    assert [link.transport for link in (*prefill.links, *decode.links)] == ["ipc", "ipc"]
    shipped = prefill.bytes_shipped - before["prefill-0"].bytes_shipped
    assert shipped == decode.bytes_received - before["decode-0"].bytes_received > 0
    assert decode.handoffs_committed == before["decode-0"].handoffs_committed + len(LENGTHS)
    assert prefill.link_fallbacks == 0
    assert link_memory(prefill) == link_memory(decode) != set()
    assert not joined_by_tcp(prefill, decode)


def link_memory(report: IntegrityReport) -> set[str]:
    """Inodes of the link memory that a worker's engine maps."""
    lines = Path(f"/proc/{report.engine_pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:baton-link " in line}


def joined_by_tcp(one: IntegrityReport, other: IntegrityReport) -> bool:
    ours, theirs = tcp_sockets([one.engine_pid]), tcp_sockets([other.engine_pid])
    return any((a.local_port, a.remote_port) == (b.remote_port, b.local_port) for a in ours for b in theirs)
