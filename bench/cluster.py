"""What the cluster adds to its engine: TTFT, TPOT and ring-to-client latency over a fixed step time.

    python -m bench.cluster --streams 1,16,64 [--step-ms 5] [--output-len 400] [--json]

One router, one prefill and one decode worker with fake engines (`bench/fake_engine.py`), and this process
as their client over gRPC. Beside it the same engine alone, in this process, with nobody to talk to. With
--json one object a case goes to stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import numpy as np
import torch
import uvloop

from baton.cli.local_cluster import LocalCluster, Programs
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.router_pb2_grpc import RouterServiceStub
from bench.bare_engine import BareEngine
from bench.fake_engine import STEP_VARIABLE, VOCAB, age_ms, load, write_model
from services.common.config import EngineConfig, RouterSettings, SupervisionSettings, UpConfig

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

MODEL = "fake"
PROMPT = 32
ROUNDS = 3
_CALL_S = 120.0


@dataclass(slots=True)
class Seen:
    """What the clients of one case saw; milliseconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    ring_to_client: list[float] = field(default_factory=list)
    tokens: int = 0
    messages: int = 0


def percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q)) if values else float("nan")


async def one_request(stub: RouterServiceAsyncStub, output_len: int, delay_s: float, seen: Seen) -> None:
    """Streams one request and notes when each message came."""
    await asyncio.sleep(delay_s)
    prompt = TokenIds(ids=[random.randrange(VOCAB) for _ in range(PROMPT)])
    request = GenerateRequest(
        model=MODEL, token_ids=prompt, temperature=0, max_tokens=output_len, ignore_eos=True
    )
    sent = time.monotonic_ns()
    first = last = 0
    count = 0
    async for message in stub.Generate(request, timeout=_CALL_S):
        if not message.token_ids:
            continue
        now = time.monotonic_ns()
        first, last = first or now, now
        # Token 0 comes from prefill, not from a ring.
        seen.ring_to_client += [
            age_ms(t, now) for n, t in enumerate(message.token_ids, message.first_number) if n
        ]
        count += len(message.token_ids)
        seen.messages += 1
    if count != output_len:
        raise RuntimeError(f"{count} tokens came instead of {output_len}")
    seen.ttft.append((first - sent) / 1e6)
    seen.tpot.append((last - first) / 1e6 / (count - 1))
    seen.tokens += count


async def through_the_cluster(address: str, streams: int, output_len: int, rounds: int) -> Seen:
    """`streams` closed-loop clients, each `rounds` requests, the first started at random moments."""
    seen = Seen()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = RouterServiceStub(channel)
        await one_request(stub, 8, 0, Seen())  # opens links and caches

        async def client() -> None:
            for _ in range(rounds):
                await one_request(stub, output_len, random.random() * 0.5, seen)

        await asyncio.gather(*(client() for _ in range(streams)))
    return seen


def alone(folder: Path, streams: int, output_len: int) -> tuple[float, float]:
    """(TTFT, TPOT) in ms of the same steps without front, router or client."""
    engine = BareEngine(load(str(folder), EngineConfig(slots=streams)), streams)
    begun = time.monotonic()
    engine.prefill_one(PROMPT, output_len)
    ttft = (time.monotonic() - begun) * 1e3
    for _ in range(streams - 1):
        engine.prefill_one(PROMPT, output_len)
    engine.step()
    begun = time.monotonic()
    steps = output_len - 2
    for _ in range(steps):
        engine.step()
    return ttft, (time.monotonic() - begun) * 1e3 / steps


def report(
    arguments: argparse.Namespace, streams: int, seen: Seen, bare: tuple[float, float]
) -> dict[str, object]:
    bare_ttft, bare_tpot = bare
    return {
        "streams": streams,
        "step_ms": arguments.step_ms,
        "prompt": PROMPT,
        "output_len": arguments.output_len,
        "requests": len(seen.ttft),
        "tpot_ms": round(fmean(seen.tpot), 4),
        "tpot_alone_ms": round(bare_tpot, 4),
        "tpot_added_ms": round(fmean(seen.tpot) - bare_tpot, 4),
        "ttft_ms_p50": round(percentile(seen.ttft, 50), 3),
        "ttft_ms_p99": round(percentile(seen.ttft, 99), 3),
        "ttft_alone_ms": round(bare_ttft, 3),
        "ttft_added_ms": round(percentile(seen.ttft, 50) - bare_ttft, 3),
        "ring_to_client_ms_p50": round(percentile(seen.ring_to_client, 50), 3),
        "ring_to_client_ms_p99": round(percentile(seen.ring_to_client, 99), 3),
        "tokens_a_message": round(seen.tokens / seen.messages, 3),
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "torch": torch.__version__,
            "grpc": grpc.__version__,
            "python": platform.python_version(),
        },
    }


async def run(arguments: argparse.Namespace) -> None:
    os.environ[STEP_VARIABLE] = str(arguments.step_ms)
    random.seed(arguments.seed)
    torch.set_num_threads(1)
    streams = [int(part) for part in arguments.streams.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name))
        config = UpConfig(
            served_model_name=MODEL,
            engine=EngineConfig(device="cpu", slots=max(streams)),
            router=RouterSettings(http_port=0, grpc_port=0),
            supervision=SupervisionSettings(ray_address="none"),  # Ray is on no request's path
            log_level="error",
        )
        worker = (sys.executable, "-m", "bench.fake_engine", "worker")
        cluster = LocalCluster(config, folder, Programs(worker=worker))
        try:
            doors = await cluster.start()
            for count in streams:
                print(f"{count} streams …", file=sys.stderr)
                seen = await through_the_cluster(doors.grpc, count, arguments.output_len, arguments.rounds)
                bare = await asyncio.to_thread(alone, folder, count, arguments.output_len)
                show(report(arguments, count, seen, bare), arguments.json)
        finally:
            await cluster.stop(20)


def show(case: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(case), flush=True)
        return
    for key, value in case.items():
        print(f"{key:24} {value}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,16,64", help="comma-separated numbers of closed-loop clients")
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of one engine step")
    parser.add_argument("--output-len", type=int, default=400, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="requests of each client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object a case on stdout")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
