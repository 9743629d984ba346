"""The overhead of the cluster over its engine: TTFT, TPOT and ring-to-client latency at a fixed step time.

    python -m bench.cluster [--streams 1,16,64] [--step-ms 5] [--output-len 400] [--rounds 3] [--json]

One router, one prefill and one decode worker with fake engines (`bench/cluster/fake_engine.py`), and this
process as their clients over gRPC, in closed loops that are not in step with each other. A round is a run of
all clients and, right after it, the bare engine in this process without a cluster
(`BarePrefill`, `BareDecode` there):

    TTFT      at the client, from its send, minus that of the bare prefill loop to which the same prompts
              come at the same times: waiting for the steps of others is in both
    TPOT      mean over requests, handoff included, minus the mean step of the bare decode loop with as many
              slots, all in use
    ring to client   from the step's end, before its word is written, to the message's arrival

The router has a core that it shares with the prefill worker alone, and all else shares the others: a kernel
that packs tasks onto few processors would let them queue behind each other beside an idle one. Each figure is
the median of the rounds' figures. `cpu` is what each process used, in processors, `others` being all that is
not ours: a run with much of it, or with `stolen`, is disturbed. With --json one object a case goes to stdout;
progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import grpc
import grpc.aio
import numpy as np
import torch
import uvloop

from baton.base.process_tuning import batch_wakeups
from bench.cluster.clients import Call, Clients, Seen
from bench.cluster.fake_engine import STEP_VARIABLE, BareDecode, BarePrefill, load
from bench.model_folders import write_fake_model
from bench.options import program_parser, run_program, show
from bench.processes import Usage, cluster_processes, put_on
from services.cli.up.local_cluster import LocalCluster, Programs
from services.common.config.cluster import SupervisionSettings
from services.common.config.router import RouterSettings
from services.common.config.settings_tree.settings import Settings
from services.common.config.worker import EngineConfig

MODEL = "fake"
PROMPT = 32
ROUNDS = 3
_WARM_TOKENS = 8
_BARE_STEPS = 200


@dataclass(frozen=True, slots=True)
class Round:
    """One run of all clients, followed by the bare engine."""

    seen: Seen
    bare_ttft: list[float]
    bare_tpot: float
    cpu: dict[str, float]
    seconds: float
    messages: int  # of all requests, counted or not

    def figures(self) -> dict[str, float]:
        """The reported figures; the report has the median of each."""
        seen = self.seen
        ttft, bare_ttft = (float(np.median(values)) for values in (seen.ttft, self.bare_ttft))
        tpot = fmean(seen.tpot)
        return {
            "tpot_ms": tpot,
            "tpot_alone_ms": self.bare_tpot,
            "tpot_added_ms": tpot - self.bare_tpot,
            "ttft_ms": ttft,
            "ttft_alone_ms": bare_ttft,
            "ttft_added_ms": ttft - bare_ttft,
            "ttft_ms_p99": float(np.percentile(seen.ttft, 99)),
            "ttft_alone_ms_p99": float(np.percentile(self.bare_ttft, 99)),
            "ring_to_client_ms_p50": float(np.percentile(seen.ring_to_client, 50)),
            "ring_to_client_ms_p99": float(np.percentile(seen.ring_to_client, 99)),
            "tokens_a_message": seen.tokens / seen.messages,
            "router_us_a_message": self.cpu["router"] * self.seconds * 1e6 / self.messages,
        }


def report(arguments: argparse.Namespace, streams: int, rounds: Sequence[Round]) -> dict[str, object]:
    figures = [one.figures() for one in rounds]
    return {
        "streams": streams,
        "step_ms": arguments.step_ms,
        "prompt": PROMPT,
        "output_len": arguments.output_len,
        "rounds": len(rounds),
        "requests": sum(len(one.seen.ttft) for one in rounds),
        **{name: round(median(one[name] for one in figures), 3) for name in figures[0]},
        "cpu": {name: round(median(one.cpu[name] for one in rounds), 3) for name in rounds[0].cpu},
        "others_cpu_rounds": [round(one.cpu["others"], 2) for one in rounds],
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "torch": torch.__version__,
            "grpc": grpc.__version__,
            "python": platform.python_version(),
        },
    }


class Bench:
    """A running cluster and its clients."""

    def __init__(
        self, arguments: argparse.Namespace, folder: Path, channel: grpc.aio.Channel, admin: str
    ) -> None:
        self._arguments = arguments
        self._folder = folder
        self._channel = channel
        self._admin = admin
        self._cores = sorted(os.sched_getaffinity(0))

    async def case(self, streams: int) -> list[Round]:
        pids = await self._processes()
        await Clients(self._channel, MODEL, PROMPT, _WARM_TOKENS).run(streams, 1)  # links and caches
        gc.collect()
        gc.freeze()  # later collections only look at what the clients receive
        return [await self._round(streams, pids) for _ in range(self._arguments.rounds)]

    async def _round(self, streams: int, pids: dict[str, int]) -> Round:
        output_len = self._arguments.output_len
        clients = Clients(self._channel, MODEL, PROMPT, output_len)
        loop = asyncio.get_running_loop()
        begun, usage = loop.time(), Usage(pids)
        calls = await clients.run(streams, self._arguments.requests)
        seconds, cpu = loop.time() - begun, usage.shares()
        seen = Seen.of(calls, output_len)
        messages = sum(len(call.messages) for call in calls)
        ttft, tpot = await asyncio.to_thread(self._alone, streams, calls)
        return Round(seen, ttft, tpot, cpu, seconds, messages)

    def _alone(self, streams: int, calls: Sequence[Call]) -> tuple[list[float], float]:
        engine = EngineConfig(device="cpu", slots=streams)
        model = load(str(self._folder), engine)
        replayed = BarePrefill(model, engine).replay([call.sent_ns for call in calls], PROMPT)
        ttft = [ms for call, ms in zip(calls, replayed, strict=True) if call.counted]
        return ttft, BareDecode(model, streams, PROMPT, _BARE_STEPS + 2).tpot(_BARE_STEPS)

    async def _processes(self) -> dict[str, int]:
        """Pins the router to the first core, prefill to any, and all others to the rest."""
        pids = await cluster_processes(self._admin)
        places = {"router": self._cores[:1], "prefill_front": self._cores, "prefill_engine": self._cores}
        for name, pid in pids.items():
            put_on(places.get(name, self._cores[1:]) or self._cores, pid)
        return pids


async def run(arguments: argparse.Namespace) -> None:
    os.environ[STEP_VARIABLE] = str(arguments.step_ms)
    random.seed(arguments.seed)
    torch.set_num_threads(1)
    streams = [int(part) for part in arguments.streams.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = write_fake_model(Path(name))
        config = Settings(
            served_model_name=MODEL,
            engine=EngineConfig(device="cpu", slots=max(streams)),
            router=RouterSettings(http_port=0, grpc_port=0),
            supervision=SupervisionSettings(ray_address="none"),  # Ray is on no request's path
            log_level="error",
        )
        worker = (sys.executable, "-m", "bench.cluster.fake_engine", "worker")
        cluster = LocalCluster(config, folder, Programs(worker=worker))
        try:
            addresses = await cluster.start()
            batch_wakeups()  # as any busy gRPC client would
            async with grpc.aio.insecure_channel(addresses.grpc) as channel:
                bench = Bench(arguments, folder, channel, addresses.admin)
                for count in streams:
                    print(f"{count} streams …", file=sys.stderr)
                    show(report(arguments, count, await bench.case(count)), arguments.json)
        finally:
            await cluster.stop(20)


def main() -> None:
    parser = program_parser("cluster", __doc__)
    parser.add_argument("--streams", default="1,16,64", help="comma-separated numbers of closed-loop clients")
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of one engine step")
    parser.add_argument("--output-len", type=int, default=400, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each case")
    parser.add_argument("--requests", type=int, default=3, help="requests of each client in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object a case on stdout")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    run_program("cluster", main)
