"""The accuracy of loadgen: its percentiles, the highest rate of one process, its search.

    python -m bench.cluster.loadgen_accuracy truth --protocols grpc,http --rates 10,200,1000 [--seconds 30]
    [--json]
    python -m bench.cluster.loadgen_accuracy limit --protocols grpc,http [--processes 1,2] [--servers 2 --pin]
    [--json]
    python -m bench.cluster.loadgen_accuracy search --protocols grpc [--budget 480] [--json]

Compared with a server that logs when it emitted each token (`tests/loadgen/fake_server.py`), on the same
machine and clock. `truth`: the error of every percentile. `limit`: rates 25 % apart, and the highest whose
p50 to p99 are within 5 % or 3 ms. Above it a run is accepted if it is VALID and right about what arrived at
its machine, which is known over HTTP (`late_before_it_came`); a run that is VALID and wrong about that has
`lied`. `search`: a server that serves one request after another, 20 ms each, which is M/D/1, and a limit of
100 ms to the first token; the goodput found in real time is compared with the formula.

A server uses about as much CPU as one process of the generator, so at least two free cores are needed. To
measure several processes, use as many servers (they share one port) and cores for all (--pin); or, on two
cores, limit each process to a part of one (--core-share 0.3).
With --json one object per case goes to stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.cluster.core_share import core_share
from bench.cluster.highest_rate import highest
from bench.machine import spread_out
from tests.loadgen.fake_server import Behaviour
from tests.loadgen.goodput.queues import MG1, goodput
from tests.loadgen.processes import loadgen_process, served
from tests.loadgen.truth import Tolerance, Truth, measure

CLOSE = Tolerance(ms=1.0, share=0.01)
LOOSE = Tolerance(ms=3.0, share=0.05)
TRUTH_SECONDS, LIMIT_SECONDS = 30.0, 8.0
SERVICE_S, LIMIT_S = 0.02, 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case was measured; whether it holds is in the figures."""
    arguments = _parser().parse_args(argv)
    for case in {"truth": truth, "limit": limit, "search": search}[arguments.what](arguments):
        result = {"bench": f"loadgen {arguments.what}", **case, "device": _device()}
        print(
            json.dumps(result) if arguments.json else "  ".join(f"{k}={_short(v)}" for k, v in case.items()),
            flush=True,
        )
    return 0


def truth(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A queue's latencies at each rate and protocol."""
    for protocol in arguments.protocols.split(","):
        for rate in map(float, arguments.rates.split(",")):
            behaviour = Behaviour(first_s=0.02, gap_s=0.004)
            if rate <= 200:
                behaviour = Behaviour(service_s=(0.001, 0.002, 0.004), gap_s=0.004)
            tolerance = CLOSE if rate <= 200 else LOOSE
            seconds = arguments.seconds or TRUTH_SECONDS
            found = _run(behaviour, protocol, rate, seconds, arguments.output_len, 1)
            wrong = found.beyond(tolerance)
            yield {"holds": not wrong, "wrong": wrong, **found.as_dict()}


def limit(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The highest rate of each protocol and number of processes."""
    for protocol in arguments.protocols.split(","):
        for processes in map(int, arguments.processes.split(",")):
            began = time.monotonic()
            limit = Limit(arguments, protocol, processes)
            believed, invalid = highest(arguments.start_rate * processes, limit.believed)
            yield {
                "protocol": protocol,
                "processes": processes,
                "output_len": arguments.output_len,
                **limit.best(),
                "believed_at_rate": believed,
                "not_at_rate": invalid,
                "ended_because": limit.reasons,
                "late_before_it_came": sorted(limit.late),
                "lied": sorted(limit.lied),
                "seconds": round(time.monotonic() - began),
            }


class Limit:
    """The runs of one protocol and number of processes. One that fails is made again: a host has bad
    seconds."""

    def __init__(self, arguments: argparse.Namespace, protocol: str, processes: int) -> None:
        self._arguments = arguments
        self._protocol = protocol
        self._processes = processes
        self._right: Truth | None = None
        # Why the lowest rate that was not believed was not.
        self.reasons: list[str] = []
        self._lowest = math.inf
        # Rates with a run that is VALID but wrong: tokens arrived late, or it was late itself.
        self.late: set[float] = set()
        self.lied: set[float] = set()

    def best(self) -> dict[str, Any]:
        """The highest rate whose percentiles are the server's."""
        right = self._right
        if right is None:
            return {"requests_s": None}
        return {
            "requests_s": round(right.rate, 1),
            "tokens_s": round(right.output_tokens),
            "lag_p99_ms": round(right.lag_p99_ms, 2),
            "read_lag_p99_ms": right.read_lag_p99_ms,
            "cpu_share": round(right.cpu_share, 2),
        }

    def believed(self, rate: float) -> bool:
        """Whether a run at this rate is VALID, and right of what came to its machine."""
        believed, why = False, list[str]()
        for _ in range(self._arguments.tries):
            found = self._run(rate)
            off = found.beyond(LOOSE)
            if found.valid and not off:
                if self._right is None or found.rate > self._right.rate:
                    self._right = found
                return True
            if not found.valid:
                why = found.invalid
            elif found.innocent(LOOSE):
                self.late.add(round(rate, 1))
                believed = True
            else:
                self.lied.add(round(rate, 1))
                why = off
        if not believed and rate < self._lowest:
            self._lowest, self.reasons = rate, why
        return believed

    def _run(self, rate: float) -> Truth:
        arguments, behaviour = self._arguments, Behaviour(first_s=0.02, gap_s=0.004)
        return _run(
            *(behaviour, self._protocol, rate, arguments.seconds or LIMIT_SECONDS, arguments.output_len),
            *(self._processes,),
            beyond=(),
            servers=arguments.servers,
            pin=arguments.pin,
            share=arguments.core_share,
        )


def search(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One search of each protocol, in real time."""
    exact = goodput(MG1((SERVICE_S,), (1.0,), LIMIT_S), 0.9)
    flags = ["--budget", f"{arguments.budget:g}", "--goodput", f"ttft:{LIMIT_S * 1e3:g}", "--input-len", "16"]
    flags += ["--output-len", "1", "--attainment", "0.9", "--max-lag-ms", f"{arguments.max_lag_ms:g}"]
    flags += ["--max-read-lag-ms", f"{arguments.max_read_lag_ms:g}", "--json"]
    for protocol in arguments.protocols.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            with served(Behaviour(service_s=(SERVICE_S,)), path) as server:
                began = time.monotonic()
                url, out = getattr(server, protocol), str(path / "out")
                done = loadgen_process("search", url, *flags, "--out", out, timeout_s=2 * arguments.budget)
                took = time.monotonic() - began
        print(done.err, file=sys.stderr, flush=True)
        found = done.json
        yield {
            "protocol": protocol,
            "formula": exact,
            **_against(found["crossing"], exact),
            "seconds": took,
            "runs": len(found["points"]),
            "confirmed": found["confirmed"],
            "invalid": found["invalid"],
        }


def _against(crossing: dict[str, float] | None, exact: float) -> dict[str, Any]:
    if crossing is None:
        return {"found": None, "within_5_percent": False}
    off = crossing["rate"] / exact - 1
    return {
        "found": crossing["rate"],
        "interval": [crossing["low"], crossing["high"]],
        "off": off,
        "within_5_percent": abs(off) <= 0.05,
        "interval_holds_it": crossing["low"] <= exact <= crossing["high"],
    }


def _run(
    behaviour: Behaviour,
    protocol: str,
    rate: float,
    seconds: float,
    output_len: int,
    processes: int,
    beyond: Sequence[float] = (99.9, 100.0),
    servers: int = 1,
    *,
    pin: bool = False,
    share: float | None = None,
) -> Truth:
    flags = ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", "--input-len", "16", "--timeout", "60"]
    flags += ["--output-len", str(output_len), "--processes", str(processes)]
    cpus: list[int] = []
    if pin:
        cpus = spread_out(servers + processes)
        flags += ["--cpus", ",".join(map(str, cpus[servers:]))]
    if servers > 1:
        flags += ["--connections", str(4 * servers)]  # which server one goes to is drawn
    with contextlib.ExitStack() as held:
        path = Path(held.enter_context(tempfile.TemporaryDirectory()))
        if share is not None:
            held.enter_context(core_share(share, "loadgen.generator.worker"))
        found = measure(
            lambda one: served(one, path, servers, cpus[:servers]),
            behaviour,
            protocol,
            path / "out",
            *flags,
            beyond=beyond,
        )
    off = "; ".join(found.invalid or found.beyond(LOOSE))
    line = f"{protocol} x{processes} {rate:.0f}/s: valid={found.valid} lag={found.lag_p99_ms:.1f} ms {off}"
    print(line, file=sys.stderr, flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.cluster.loadgen_accuracy", description=__doc__)
    parser.add_argument("what", choices=("truth", "limit", "search"))
    parser.add_argument("--protocols", default="grpc,http")
    parser.add_argument("--rates", default="10,200,1000", help="of truth")
    parser.add_argument("--seconds", type=float, help="of each run (truth: 30, limit: 8)")
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--processes", default="1", help="of limit")
    parser.add_argument("--servers", type=int, default=1, help="of limit")
    parser.add_argument("--start-rate", type=float, default=800.0, help="of limit, for each process")
    parser.add_argument("--tries", type=int, default=2, help="of limit, at each rate")
    parser.add_argument(
        "--pin", action="store_true", help="a processor for each server and process of the generator"
    )
    parser.add_argument(
        "--core-share", type=float, metavar="0.3", help="of limit: no more of a core for each process of it"
    )
    parser.add_argument("--budget", type=float, default=480.0, help="of search, in seconds")
    parser.add_argument("--max-lag-ms", type=float, default=5.0, help="of search; more on a busy machine")
    parser.add_argument("--max-read-lag-ms", type=float, default=3.0, help="likewise")
    parser.add_argument("--json", action="store_true")
    return parser


def _device() -> str:
    return f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
