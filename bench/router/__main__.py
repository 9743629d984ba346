"""The router alone between fake workers and clients that only count: what tokens and open streams cost it.

    python -m bench.router [--cases grpc,sse,ttft,requests,memory] [--processes 1] [--rates 12000,24000,36000]

    grpc, sse   `--streams` streams (256) at each of the rates, tokens a second that the workers make.
                `kept_up`: the share of them that arrived. `tokens_a_message` above 1: tokens have waited for
                each other. `router_us_a_token`: processor time of all of the router's threads;
                `tokens_a_cpu_s`: its inverse, what a whole core would carry. Both say more on a busy machine
                than the rates do.
    ttft        from a request's send to its first token, at 64 streams of gRPC with steps of 5 ms. Prefill
                takes no time: what is left is what the router and the connections add
    requests    64 streams of each API, whose requests have two tokens, a second's pause between them:
                `router_ms_a_request`, the processor time of all that is not tokens
    memory      `--open` streams (5,000) of each API with a token a second: memory of the router's processes

The router has as many cores as processes, everything else has the rest. `cpu`: processors that were used,
`others` being all that is not ours: a run with much of it, or with `stolen`, is disturbed. `yardstick_us`:
processor time of a short loop in Python on the router's core; threads of one core and caches that others
share slow both it and the router.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.model_folders import write_fake_model
from bench.options import program_parser, show
from bench.processes import Usage
from bench.router.servers import (
    Clients,
    Router,
    Workers,
    fake_workers,
    resident_mb,
    router,
    split_cores,
    yardstick_us,
)

_TTFT_STREAMS, _TTFT_STEP_MS, _PAUSE_S = 64, 5.0, 0.5
_SHORT_OUTPUT, _SHORT_PAUSE_S = 2, 1.0
_MEMORY_STEP_MS, _MEMORY_OUTPUT = 1000.0, 600


class Bench:
    """Runs the cases, each with processes of its own."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder

    def cases(self, processes: int) -> Iterator[dict[str, object]]:
        """Runs the requested cases with `processes` router processes."""
        for case in self._arguments.cases.split(","):
            if case == "ttft":
                yield self._ttft(processes)
            elif case == "requests":
                yield from (self._requests(processes, api) for api in ("grpc", "sse"))
            elif case == "memory":
                yield from (self._memory(processes, api) for api in ("grpc", "sse"))
            else:
                yield from (
                    self._rate(processes, case, float(rate)) for rate in self._arguments.rates.split(",")
                )

    def _rate(self, processes: int, api: str, rate: float) -> dict[str, object]:
        streams = self._arguments.streams
        measured = self._measure(
            processes, api, streams, 1e3 * streams / rate, self._arguments.output_len, 0.0
        )
        counts, seconds, cpu = measured["counts"], measured["seconds"], measured["cpu"]
        tokens = max(1, counts["tokens"])
        # No less than processor time is counted by.
        busy_s = max(cpu["router"] * seconds, 1 / os.sysconf("SC_CLK_TCK"))
        return {
            "case": api,
            "processes": processes,
            "streams": streams,
            "rate": rate,
            "tokens_s": round(tokens / seconds),
            "kept_up": round(tokens / seconds / rate, 3),
            "tokens_a_message": round(tokens / max(1, counts["messages"]), 3),
            "router_us_a_token": round(1e6 * busy_s / tokens, 2),
            "tokens_a_cpu_s": round(tokens / busy_s),
            **_common(measured),
        }

    def _ttft(self, processes: int) -> dict[str, object]:
        measured = self._measure(
            processes, "grpc", _TTFT_STREAMS, _TTFT_STEP_MS, self._arguments.output_len, _PAUSE_S
        )
        ttft = np.array(measured["counts"]["ttft_ms"])
        return {
            "case": "ttft",
            "processes": processes,
            "streams": _TTFT_STREAMS,
            "ttft_added_ms_p50": round(float(np.percentile(ttft, 50)), 3),
            "ttft_added_ms_p99": round(float(np.percentile(ttft, 99)), 3),
            **_common(measured),
        }

    def _requests(self, processes: int, api: str) -> dict[str, object]:
        measured = self._measure(processes, api, _TTFT_STREAMS, _TTFT_STEP_MS, _SHORT_OUTPUT, _SHORT_PAUSE_S)
        cpu_s, requests = measured["cpu"]["router"] * measured["seconds"], measured["counts"]["requests"]
        return {
            "case": f"requests_{api}",
            "processes": processes,
            "streams": _TTFT_STREAMS,
            "router_ms_a_request": round(1e3 * cpu_s / max(1, requests), 3),
            **_common(measured),
        }

    def _memory(self, processes: int, api: str) -> dict[str, object]:
        streams = self._arguments.open
        open_s = self._arguments.warm_s / 2  # at once, gRPC would refuse most of them unseen
        measured = self._measure(processes, api, streams, _MEMORY_STEP_MS, _MEMORY_OUTPUT, open_s)
        return {
            "case": f"memory_{api}",
            "processes": processes,
            "streams": streams,
            "idle_mb": round(measured["idle_mb"]),
            "open_mb": round(measured["open_mb"]),
            # As many as streams were open.
            "tokens_s": round(measured["counts"]["tokens"] / measured["seconds"]),
            "kb_a_stream": round((measured["open_mb"] - measured["idle_mb"]) * 1024 / streams, 1),
            **_common(measured),
        }

    def _measure(
        self, processes: int, api: str, streams: int, step_ms: float, output_len: int, pause_s: float
    ) -> dict[str, Any]:
        arguments = self._arguments
        own, others = split_cores(processes)
        with (
            fake_workers(self._folder, step_ms, streams + 64, others) as workers,
            router(self._folder, workers, processes, streams, own) as running,
        ):
            clients = Clients(arguments.client_processes, others)
            try:
                idle_mb = resident_mb(running.pids)
                clients.start(
                    streams,
                    arguments.connections,
                    api=api,
                    address=running.addresses["http" if api == "sse" else "grpc"],
                    output_len=output_len,
                    pause_s=pause_s or min(2.0, output_len * step_ms / 1e3),
                )
                time.sleep(arguments.warm_s)
                return {"idle_mb": idle_mb, **self._window(running, workers, clients)}
            finally:
                clients.end()

    def _window(self, running: Router, workers: Workers, clients: Clients) -> dict[str, Any]:
        """Counts and processor time of the measured seconds."""
        names = {f"router{pid}": pid for pid in running.pids}
        names |= {f"clients{pid}": pid for pid in clients.pids} | {"workers": workers.pid}
        clients.reset()
        began, usage = time.monotonic(), Usage(names)
        time.sleep(self._arguments.seconds)
        counts, shares = clients.read(), usage.shares()
        cpu = {
            name: sum(share for key, share in shares.items() if key.startswith(name))
            for name in ("router", "clients", "workers", "others", "stolen")
        }
        seconds = time.monotonic() - began
        return {
            "counts": counts,
            "cpu": cpu,
            "seconds": seconds,
            "open_mb": resident_mb(running.pids),
            "yardstick_us": yardstick_us(running.cores[0]),
        }


def _common(measured: dict[str, Any]) -> dict[str, object]:
    counts = measured["counts"]
    return {
        "requests": counts["requests"],
        "failed": counts["failed"],
        "cpu": {name: round(value, 3) for name, value in measured["cpu"].items()},
        "yardstick_us": round(measured["yardstick_us"], 1),
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = program_parser("router", __doc__)
    parser.add_argument("--cases", default="grpc,sse,ttft,requests,memory", help="comma-separated")
    parser.add_argument("--processes", default="1", help="comma-separated numbers of router processes")
    parser.add_argument("--rates", default="12000,24000,36000", help="tokens a second, comma-separated")
    parser.add_argument("--streams", type=int, default=256, help="streams of the cases grpc and sse")
    parser.add_argument("--open", type=int, default=5000, help="streams of the case memory")
    parser.add_argument("--output-len", type=int, default=400, help="tokens of a request")
    parser.add_argument("--connections", type=int, default=16, help="gRPC connections of all clients")
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--warm-s", type=float, default=4.0, help="seconds before each measurement")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--json", action="store_true", help="one object a case on stdout")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(arguments, write_fake_model(Path(name)))
        for processes in map(int, arguments.processes.split(",")):
            for case in bench.cases(processes):
                show(case, arguments.json)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
