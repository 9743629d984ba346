"""How far loadgen's own numbers are right, how much one process can send, how near a search comes.

    python -m bench.loadgen truth --doors grpc,http --rates 10,200,1000 [--seconds 30] [--json]
    python -m bench.loadgen limit --doors grpc,http [--output-len 4] [--processes 1,2] [--servers 2] [--json]
    python -m bench.loadgen search --doors grpc [--budget 480] [--json]

Against a server that logs when it emitted each token (`tests/loadgen/fake_server.py`), on the same machine
and clock. `truth`: the error of every percentile. `limit`: rates 25 % apart, up to the first that is INVALID
or whose p50 to p99 are off by more than 5 % and 3 ms; a run that is wrong and says VALID is called `lied`.
`search`: a server that takes one request after another, 20 ms each, which is M/D/1, and a limit of 100 ms to
the first token; the goodput found in real time beside the formula's.

A server takes about as much CPU as one process of the generator, so two free cores are the least; to see the
generator grow with its processes, give it as many servers (they share one port), and cores for all. With
--json one object a case goes to stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.loadgen.fake_server import Behaviour
from tests.loadgen.processes import loadgen, served
from tests.loadgen.queues import MG1, goodput
from tests.loadgen.truth import Tolerance, Truth, measure

CLOSE = Tolerance(ms=1.0, share=0.01)
LOOSE = Tolerance(ms=3.0, share=0.05)
STEP = 1.25
LIMIT_SECONDS = 8.0
_MOST = 40
SERVICE_S, LIMIT_S = 0.02, 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every case was measured; whether it holds is in the figures."""
    arguments = _parser().parse_args(argv)
    for case in {"truth": truth, "limit": limit, "search": search}[arguments.what](arguments):
        told = {"bench": f"loadgen {arguments.what}", **case, "device": _device()}
        print(
            json.dumps(told) if arguments.json else "  ".join(f"{k}={_short(v)}" for k, v in case.items()),
            flush=True,
        )
    return 0


def truth(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A queue's latencies at each rate and door."""
    for door in arguments.doors.split(","):
        for rate in map(float, arguments.rates.split(",")):
            behaviour = Behaviour(first_s=0.02, gap_s=0.004)
            if rate <= 200:
                behaviour = Behaviour(service_s=(0.001, 0.002, 0.004), gap_s=0.004)
            tolerance = CLOSE if rate <= 200 else LOOSE
            found = _run(behaviour, door, rate, arguments.seconds, arguments.output_len, 1)
            wrong = found.beyond(tolerance)
            yield {"holds": not wrong, "wrong": wrong, **found.as_dict()}


def limit(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The highest rate that holds, of each door and number of processes."""
    behaviour = Behaviour(first_s=0.02, gap_s=0.004)
    for door in arguments.doors.split(","):
        for processes in map(int, arguments.processes.split(",")):
            best: Truth | None = None
            lied: list[float] = []
            rate = arguments.start_rate
            for _ in range(_MOST):
                found = _run(
                    *(behaviour, door, rate, LIMIT_SECONDS, arguments.output_len, processes),
                    beyond=(),
                    servers=arguments.servers,
                )
                holds = found.holds(LOOSE)
                if found.valid and not holds:
                    lied.append(round(rate, 1))
                if not (found.valid and holds):
                    break
                best, rate = found, rate * STEP
            yield {
                "door": door,
                "processes": processes,
                "output_len": arguments.output_len,
                "requests_s": None if best is None else round(best.rate, 1),
                "tokens_s": None if best is None else round(best.output_tokens),
                "lag_p99_ms": None if best is None else round(best.lag_p99_ms, 2),
                "cpu_share": None if best is None else round(best.cpu_share, 2),
                "ended_at_rate": round(rate, 1),
                "ended_because": found.invalid or found.beyond(LOOSE),
                "lied": lied,
            }


def search(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One search of each door, in real time."""
    exact = goodput(MG1((SERVICE_S,), (1.0,), LIMIT_S), 0.9)
    flags = ["--budget", f"{arguments.budget:g}", "--goodput", f"ttft:{LIMIT_S * 1e3:g}", "--input-len", "16"]
    flags += ["--output-len", "1", "--attainment", "0.9", "--max-lag-ms", f"{arguments.max_lag_ms:g}"]
    flags += ["--json"]
    for door in arguments.doors.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            with served(Behaviour(service_s=(SERVICE_S,)), path) as server:
                began = time.monotonic()
                url, out = getattr(server, door), str(path / "out")
                done = loadgen("search", url, *flags, "--out", out, timeout_s=2 * arguments.budget)
                took = time.monotonic() - began
        print(done.err, file=sys.stderr, flush=True)
        found = done.json
        yield {
            "door": door,
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
    door: str,
    rate: float,
    seconds: float,
    output_len: int,
    processes: int,
    beyond: Sequence[float] = (99.9, 100.0),
    servers: int = 1,
) -> Truth:
    flags = ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", "--input-len", "16", "--timeout", "60"]
    flags += ["--output-len", str(output_len), "--processes", str(processes)]
    if servers > 1:
        flags += ["--connections", str(4 * servers)]  # which server one goes to is drawn
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        found = measure(
            lambda one: served(one, path, servers), behaviour, door, path / "out", *flags, beyond=beyond
        )
    print(
        f"{door} {rate:g}/s: valid={found.valid} lag={found.lag_p99_ms:.1f} ms", file=sys.stderr, flush=True
    )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.loadgen", description=__doc__)
    parser.add_argument("what", choices=("truth", "limit", "search"))
    parser.add_argument("--doors", default="grpc,http")
    parser.add_argument("--rates", default="10,200,1000", help="of truth")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run of truth")
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--processes", default="1", help="of limit")
    parser.add_argument("--servers", type=int, default=1, help="of limit")
    parser.add_argument("--start-rate", type=float, default=400.0, help="of limit")
    parser.add_argument("--budget", type=float, default=480.0, help="of search, in seconds")
    parser.add_argument("--max-lag-ms", type=float, default=5.0, help="of search; more on a busy machine")
    parser.add_argument("--json", action="store_true")
    return parser


def _device() -> str:
    return f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
