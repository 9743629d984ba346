"""Prefill and decode are processes apart, and KV crosses by kvtransfer alone.

Over grpc, where nothing else joins them; `test_ipc_transport.py` has what they share over ipc.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.model_spec.block_hash import HASH_BYTES, MAX_RESERVE_HASHES
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.decode_pb2_grpc import DecodeServiceStub
from baton.v1.prefill_pb2 import PrefillRequest
from baton.v1.prefill_pb2_grpc import PrefillServiceStub
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.types_pb2 import Attempt
from baton.v1.worker_pb2 import IntegrityReport
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up, descendants, worker_channel
from tests.e2e.support.own_engine import program
from tests.e2e.support.proc import maps_library, open_memory, tcp_sockets, writable_shared_maps
from tests.e2e.support.tampered import TAMPER
from tests.e2e.tokens.test_exact_tokens import REDUCED, Cut, judge
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE
from tests.support.reference import greedy_matches, load_reference

BLOCK_TOKENS, SLOTS = 16, 8
# Small windows, so that the longer transfers stream through them several times.
CUT = Cut(BLOCK_TOKENS, chunk_tokens=48, piece_bytes=16384, window_pieces=4)
FLAGS = (
    "--dtype",
    "float64",
    "--numerics",
    "exact",
    "--slots",
    str(SLOTS),
    "--transport",
    "grpc",
    *CUT.flags,
)
# Its cache has two groups of layers: of all tokens, and of a window.
CASE, GROUPS = next(case for case in FAMILIES if case.name == "qwen2-mixed-windows"), 2
LENGTHS = (1, 15, 16, 17, 47, 48, 49, 130, 300, 5, 64, 96)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASE.make(tmp_path_factory.mktemp("model"), seed=11)


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a file; while it exists, decode drops verified pieces."""
    return tmp_path_factory.mktemp("tampered") / "drop"


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids="{0}+{0}".format)
def cluster(request: pytest.FixtureRequest, model: Path, dropping: Path) -> Iterator[Cluster]:
    count = str(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TAMPER, str(dropping))
        with baton_up(
            model,
            *FLAGS,
            "--prefill",
            count,
            "--decode",
            count,
            fixed=CUT.fixed,
            program=program("tests.e2e.support.tampered"),
        ) as running:
            yield running


def prompt(length: int) -> list[int]:
    return [(7 * number + 13 * length) % VOCAB_SIZE for number in range(length)]


async def serve(cluster: Cluster, lengths: Sequence[int] = LENGTHS) -> dict[str, IntegrityReport]:
    """Runs a prompt of each length, all at once; the reports when all is at rest again."""
    async with cluster.stub() as stub:
        runs = [cluster.generate(stub, prompt(length), max_tokens=12, **GREEDY) for length in lengths]
        await asyncio.gather(*runs)
        await assert_all_free(cluster, 1.0)
        return await cluster.reports()


def total(reports: dict[str, IntegrityReport], role: str, count: str) -> int:
    """A count's sum over the workers of a role."""
    return sum(int(getattr(report, count)) for name, report in reports.items() if name.startswith(role))


def blocks_of(lengths: Sequence[int]) -> int:
    """The number of blocks of prompts of these lengths, all cache groups together."""
    return GROUPS * sum(-(-length // BLOCK_TOKENS) for length in lengths)


async def test_tokens_are_transformers_own_through_both_apis(cluster: Cluster, model: Path) -> None:
    """The first of this cluster: it counts all that was done. `test_exact_tokens.py` has every family."""
    await judge(cluster, model, CUT, REDUCED)


async def test_the_report_shows_what_a_running_request_holds(cluster: Cluster) -> None:
    """Before any output has ended: until then all that is asked for is reserved."""
    async with cluster.stub() as stub:
        request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=prompt(100)), max_tokens=1900, **GREEDY)
        call = stub.Generate(request, timeout=60)
        for _ in range(3):
            await call.read()
        reports = [report for name, report in (await cluster.reports()).items() if name.startswith("decode")]
        (held,) = [report for report in reports if report.live_tickets]
        assert held.live_tickets == 1
        assert held.load.slots - held.load.free_slots == 1
        # The last token's own KV is never computed.
        assert held.load.blocks - held.load.free_blocks == blocks_of([100 + 1900 - 1])
        assert held.links
        assert all(link.credited_pieces == link.window_pieces == CUT.window_pieces for link in held.links)
        call.cancel()
        await assert_all_free(cluster, 1.0)


@pytest.mark.slow
async def test_every_worker_is_two_processes_and_torch_is_in_the_engines_alone(cluster: Cluster) -> None:
    reports = await serve(cluster, LENGTHS[:4])
    fronts = [report.front_pid for report in reports.values()]
    engines = [report.engine_pid for report in reports.values()]
    everyone = descendants(cluster.process.pid)
    assert len({*fronts, *engines}) == 2 * len(reports)
    others = set(everyone) - {*fronts, *engines}
    assert len(others) == 3, "the router, who supervises the workers, and their Redis"
    assert all(maps_library(pid, "libtorch") for pid in engines)
    assert not any(maps_library(pid, "libtorch") for pid in (*fronts, *others, cluster.process.pid))


async def test_a_thread_that_is_woken_interrupts_an_engine_only(cluster: Cluster) -> None:
    """`baton.base.process_tuning`, of every thread: gRPC starts its own."""
    reports = await serve(cluster, LENGTHS[:1])
    engines = [report.engine_pid for report in reports.values()]
    streaming = [report.front_pid for report in reports.values()]
    streaming += [pid for pid in descendants(cluster.process.pid) if runs(pid, "services.router")]
    assert len(streaming) == len(reports) + 1
    assert {policy for pid in streaming for policy in policies(pid)} == {os.SCHED_BATCH}
    assert {policy for pid in engines for policy in policies(pid)} == {os.SCHED_OTHER}


def runs(pid: int, module: str) -> bool:
    return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def policies(pid: int) -> list[int]:
    """The scheduling policies of each thread of a process."""
    return [os.sched_getscheduler(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()]


async def test_no_two_workers_share_memory(cluster: Cluster) -> None:
    reports = await serve(cluster, LENGTHS[:4])
    seen: dict[tuple[str, int], str] = {}
    for name, report in reports.items():
        front, engine = (writable_shared_maps(pid) for pid in (report.front_pid, report.engine_pid))
        assert front & engine, f"{name}: front and engine share their rings, or this test sees nothing"
        for inode in {*front, *engine, *open_memory(report.front_pid), *open_memory(report.engine_pid)}:
            assert seen.setdefault(inode, name) == name, f"{name} and {seen[inode]} share {inode}"


async def test_prefill_speaks_with_decode_over_the_transfer_port_alone(cluster: Cluster) -> None:
    reports = await serve(cluster)
    prefills = [report for name, report in reports.items() if name.startswith("prefill")]
    decodes = [report for name, report in reports.items() if name.startswith("decode")]
    ours = tcp_sockets([pid for report in prefills for pid in (report.front_pid, report.engine_pid)])
    theirs = tcp_sockets([pid for report in decodes for pid in (report.front_pid, report.engine_pid)])
    receivers = {report.engine_pid for report in decodes}
    transfer_ports = {socket.local_port for socket in theirs if socket.listens and socket.pid in receivers}
    assert len(transfer_ports) == len(decodes)
    between = [
        (a, b)
        for a in ours
        for b in theirs
        if not (a.listens or b.listens) and (a.local_port, a.remote_port) == (b.remote_port, b.local_port)
    ]
    assert between, "a handoff leaves its link open, or this test sees nothing"
    senders = {report.engine_pid for report in prefills}
    assert {a.pid for a, _ in between} <= senders
    assert {b.pid for _, b in between} <= receivers
    assert {a.remote_port for a, _ in between} <= transfer_ports


async def test_bytes_shipped_are_blocks_times_block_size_and_all_arrive(cluster: Cluster) -> None:
    before = await cluster.reports()
    after = await serve(cluster)
    for report in after.values():
        sizes = zip(report.blocks_shipped, report.block_bytes, strict=True)
        assert report.bytes_shipped == sum(blocks * size for blocks, size in sizes)

    def grown(role: str, count: str) -> int:
        return total(after, role, count) - total(before, role, count)

    (of_all_groups,) = {sum(report.block_bytes) for report in after.values()}
    held = grown("decode", "blocks_resident")  # tests before have asked the same
    assert 0 < held < blocks_of(LENGTHS)
    sent = blocks_of(LENGTHS) - held
    assert grown("decode", "bytes_resident") == held // GROUPS * of_all_groups
    assert grown("prefill", "bytes_shipped") == sent // GROUPS * of_all_groups
    assert grown("decode", "bytes_received") == sent // GROUPS * of_all_groups
    assert grown("decode", "blocks_received") == sent
    assert grown("decode", "handoffs_committed") == len(LENGTHS)
    assert grown("decode", "handoffs_local") == 0
    assert grown("decode", "bytes_shipped") == grown("prefill", "bytes_received") == 0


async def test_decode_never_runs_a_prompt_and_prefill_never_decodes(cluster: Cluster) -> None:
    reports = await serve(cluster)
    assert total(reports, "decode", "prompts_run") == total(reports, "decode", "prompt_tokens_run") == 0
    assert total(reports, "prefill", "prompts_run") >= len(LENGTHS)
    assert total(reports, "prefill", "tokens_decoded") == total(reports, "prefill", "decode_steps") == 0
    assert total(reports, "decode", "tokens_decoded") >= len(LENGTHS) * 11


async def test_each_role_refuses_the_others_calls(cluster: Cluster) -> None:
    attempt = Attempt(request_id=b"r" * 16, number=1)
    addresses = {worker.identity.name: worker.address for worker in await cluster.workers()}
    async with worker_channel(addresses["decode-0"]) as channel:
        call = PrefillServiceStub(channel).Prefill(PrefillRequest(attempt=attempt), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        reserve = ReserveRequest(
            attempt=attempt, router_id=b"o" * 16, token_count=4, max_tokens=4, ttl_ms=999
        )
        for names in ([b"short"], [b"n" * HASH_BYTES] * (MAX_RESERVE_HASHES + 1)):
            reported = ReserveRequest(block_hashes=names)
            reported.MergeFrom(reserve)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await DecodeServiceStub(channel).Reserve(reported, timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with worker_channel(addresses["prefill-0"]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await DecodeServiceStub(channel).Reserve(reserve, timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await assert_all_free(cluster, 1.0)


async def test_decode_reads_the_shipped_bytes(model: Path, cluster: Cluster, dropping: Path) -> None:
    """Dropped after they were verified, they are missed: nothing else brings KV to the decode worker."""
    asked = (prompt(62), prompt(66))  # no other test has asked these
    outputs = []
    before = await cluster.reports()
    try:
        async with cluster.stub() as stub:
            for one in asked:
                outputs.append((await cluster.generate(stub, one, max_tokens=24, **GREEDY)).token_ids)
                await asyncio.to_thread(dropping.touch)
        after = await cluster.reports()
    finally:
        await asyncio.to_thread(dropping.unlink, missing_ok=True)
    assert total(after, "decode", "blocks_received") - total(
        before, "decode", "blocks_received"
    ) == GROUPS * (4 + 5)
    assert total(after, "decode", "checksum_failures") == total(after, "decode", "dropped_unknown") == 0
    reference = load_reference(model)
    greedy_matches(reference, asked[0], outputs[0])
    greedy_matches(reference, asked[1], outputs[1][:1])  # prefill's own
    with pytest.raises(AssertionError, match=r"token [1-9]"):
        greedy_matches(reference, asked[1], outputs[1])
