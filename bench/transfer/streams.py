"""Transfers to a decode worker that streams tokens at the same time: what each costs the other.

python -m bench.transfer.streams ADDRESS INCARNATION TOKENS BLOCKS
    the sender: transfers blocks to the worker at ADDRESS until its stdin closes; writes the seconds of each
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import grpc
import grpc.aio
import numpy as np
import uvloop

from baton.base.process_tuning import batch_wakeups
from baton.v1.admin_pb2 import WorkerAudit
from baton.v1.decode_pb2 import CancelRequest, ReserveRequest, SubscribeRequest, Ticket, TicketBody
from baton.v1.decode_pb2_grpc import DecodeServiceStub
from baton.v1.types_pb2 import Attempt
from bench.cluster.clients import Clients, Seen
from bench.cluster.cluster_secret import CLUSTER_SECRET, METADATA
from bench.cluster.fake_engine import STEP_VARIABLE
from bench.cluster.fake_model_folder import write_model
from bench.cluster.processes import cluster_processes, put_on, worker_audits
from bench.transfer.ends import BLOCK_BYTES, blocks_for, receiver_process
from bench.transfer.sending import SendingEnd
from kvtransfer.protocol.frames import WithdrawReason
from services.cli.up.local_cluster import LocalCluster, Programs
from services.common.config.cluster import SupervisionSettings
from services.common.config.router import RouterSettings
from services.common.config.settings import Settings
from services.common.config.transfer import TransferConfig
from services.common.config.worker import EngineConfig

MODEL = "fake"
_PROMPT = 32
_CONTEXT = 1 << 15
_BLOCK_TOKENS = 64
# 16 KiB for each token, so that a block has BLOCK_BYTES.
_KV_HEADS, _HEAD_DIM = 16, BLOCK_BYTES // _BLOCK_TOKENS // (2 * 4 * 16)
_WARM_TOKENS = 8
_TTL_MS = 60_000
_CALL_S = 5.0


def beside_streams(arguments: argparse.Namespace, sizes: list[int]) -> Iterator[tuple[int, dict[str, float]]]:
    """The figures of each transfer size."""
    yield from uvloop.run(_cases(arguments, sizes)).items()


async def _cases(arguments: argparse.Namespace, sizes: list[int]) -> dict[int, dict[str, float]]:
    random.seed(0)
    async with _cluster(arguments, max(sizes)) as (channel, admin):
        bench = _Bench(arguments, channel, await _decode_worker(admin))
        raw = {size: await asyncio.to_thread(_raw, size, arguments) for size in sizes}
        await Clients(channel, MODEL, _PROMPT, _WARM_TOKENS).run(arguments.streams, 1)  # links and caches
        await _spread(admin)
        gc.collect()
        gc.freeze()  # what is collected from now on is what the clients receive
        alone = await bench.run(None)
        found = {}
        for megabytes in sizes:
            print(f"{megabytes} MB beside {arguments.streams} streams …", file=sys.stderr)
            figures = await bench.run(megabytes)
            found[megabytes] = {
                **figures,
                "raw_gb_s": raw[megabytes],
                "ring_to_client_ms_p99_alone": alone["ring_to_client_ms_p99"],
                "tpot_ms_alone": alone["tpot_ms"],
            }
        return found


@asynccontextmanager
async def _cluster(
    arguments: argparse.Namespace, megabytes: int
) -> AsyncIterator[tuple[grpc.aio.Channel, str]]:
    """A channel to the public gRPC port of a running cluster, and its admin address."""
    os.environ[STEP_VARIABLE] = str(arguments.step_ms)
    streams = arguments.streams
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name), _CONTEXT, _KV_HEADS, _HEAD_DIM)
        blocks = 2 * blocks_for(megabytes) + 16 * streams + 1
        config = Settings(
            served_model_name=MODEL,
            engine=EngineConfig(
                device="cpu", slots=streams + 2, block_tokens=_BLOCK_TOKENS, kv_blocks=blocks, host_kv_mb=0
            ),
            transfer=TransferConfig(transport=arguments.transport),
            router=RouterSettings(http_port=0, grpc_port=0),
            supervision=SupervisionSettings(ray_address="none"),
            cluster_secret=CLUSTER_SECRET,
            log_level="error",
        )
        worker = (sys.executable, "-m", "bench.cluster.fake_engine", "worker")
        cluster = LocalCluster(config, folder, Programs(worker=worker))
        try:
            addresses = await cluster.start()
            batch_wakeups()
            async with grpc.aio.insecure_channel(addresses.grpc) as channel:
                yield channel, addresses.admin
        finally:
            await cluster.stop(20)


async def _spread(admin: str) -> None:
    """Pins clients, router and sender to the first core, and the decode worker to the others; prefill runs
    anywhere."""
    cores = sorted(os.sched_getaffinity(0))
    ours, any_core = cores[:1], cores
    places = {"clients": ours, "router": ours, "prefill_front": any_core, "prefill_engine": any_core}
    for name, pid in (await cluster_processes(admin)).items():
        put_on(places.get(name, cores[1:]) or cores, pid)


async def _decode_worker(admin: str) -> WorkerAudit:
    return next(worker for worker in await worker_audits(admin) if worker.identity.name.startswith("decode"))


class _Bench:
    """The clients of a running cluster, with or without a concurrent sender."""

    def __init__(self, arguments: argparse.Namespace, channel: grpc.aio.Channel, worker: WorkerAudit) -> None:
        self._arguments = arguments
        self._channel = channel
        self._worker = worker

    async def run(self, megabytes: int | None) -> dict[str, float]:
        """Runs all clients once, with concurrent transfers of this many MB, or none."""
        output_len = self._arguments.output_len
        clients = Clients(self._channel, MODEL, _PROMPT, output_len)
        sender = None if megabytes is None else self._sender(megabytes)
        if sender is not None and sender.stdout is not None:
            await asyncio.to_thread(sender.stdout.readline)  # it has transferred once
        calls = await clients.run(self._arguments.streams, 1)
        seen = Seen.of(calls, output_len)
        figures = {
            "ring_to_client_ms_p50": float(np.percentile(seen.ring_to_client, 50)),
            "ring_to_client_ms_p99": float(np.percentile(seen.ring_to_client, 99)),
            "tpot_ms": float(np.mean(seen.tpot)),
        }
        if sender is not None and megabytes is not None:
            output, _ = await asyncio.to_thread(sender.communicate, None, 60)
            if sender.returncode:
                raise RuntimeError(f"the sender ended with {sender.returncode}")
            result = json.loads(output)
            size, seconds = blocks_for(megabytes) * BLOCK_BYTES / 1e9, result["seconds"]
            figures |= {
                "gb_s": size / median(seconds),
                "sustained_gb_s": size * len(seconds) / result["elapsed"],
                "transfers": len(seconds),
            }
        return figures

    def _sender(self, megabytes: int) -> subprocess.Popen[str]:
        blocks = blocks_for(megabytes)
        identity = self._worker.identity
        arguments = [self._worker.address, identity.incarnation.hex(), blocks * _BLOCK_TOKENS, blocks]
        arguments.append(self._arguments.pace)
        return subprocess.Popen(
            [sys.executable, "-m", "bench.transfer.streams", *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip


def _raw(megabytes: int, arguments: argparse.Namespace) -> float:
    """Measures transfers while the streams' cluster is idle."""
    with receiver_process(1, arguments.transport) as receiver:
        seconds = [receiver.raw_seconds(megabytes) for _ in range(arguments.rounds + 1)]
    return blocks_for(megabytes) * BLOCK_BYTES / 1e9 / median(seconds[1:])


class _Reservations:
    """Reserves tickets of one decode worker, as a router does."""

    def __init__(self, stub: DecodeServiceStub, incarnation: bytes) -> None:
        self._stub = stub
        self._router_id = secrets.token_bytes(16)
        # Kept open: tickets live as long as their router's stream.
        self._following = stub.Subscribe(
            SubscribeRequest(router_id=self._router_id, incarnation=incarnation), metadata=METADATA
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for _ in self._following:
                pass
        except grpc.RpcError:
            return  # the worker has ended, or `close` was called

    def reserve(self, attempt: Attempt, tokens: int) -> tuple[Ticket, TicketBody]:
        request = ReserveRequest(
            attempt=attempt, router_id=self._router_id, token_count=tokens, max_tokens=1, ttl_ms=_TTL_MS
        )
        ticket = self._stub.Reserve(request, timeout=_CALL_S, metadata=METADATA).ticket
        return ticket, TicketBody.FromString(ticket.body)

    def cancel(self, attempt: Attempt) -> None:
        self._stub.Cancel(CancelRequest(attempt=attempt), timeout=_CALL_S, metadata=METADATA)

    def close(self) -> None:
        self._following.cancel()  # type: ignore[no-untyped-call]


def main() -> None:
    """Prints a line after the first transfer, which is a warm-up, and the times of the others in s at
    the end."""
    address, incarnation, tokens, blocks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    pace = float(sys.argv[5])
    seconds: list[float] = []
    begun = time.monotonic()
    with grpc.insecure_channel(address) as channel:
        reservations = _Reservations(DecodeServiceStub(channel), bytes.fromhex(incarnation))
        sending = None
        while not select.select([sys.stdin], [], [], 0)[0]:
            attempt = Attempt(request_id=secrets.token_bytes(16), number=1)
            ticket, body = reservations.reserve(attempt, tokens)
            if sending is None:
                sending = SendingEnd(blocks, body.fingerprint, secret=CLUSTER_SECRET)
            transfer = sending.begin(ticket, body)
            seconds.append(sending.credits_returned(transfer))
            transfer.withdraw(WithdrawReason.FINISHED)
            sending.poll()
            reservations.cancel(attempt)
            if len(seconds) == 1:
                print("begun", flush=True)
                begun = time.monotonic()
            elif pace:
                due = begun + (len(seconds) - 1) * blocks * BLOCK_BYTES / 1e9 / pace
                time.sleep(max(0.0, due - time.monotonic()))
        if sending is not None:
            sending.close()
        reservations.close()
    print(json.dumps({"seconds": seconds[1:], "elapsed": time.monotonic() - begun}))


if __name__ == "__main__":
    main()
