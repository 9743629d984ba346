"""`loadgen trace`: describes a recorded load, and converts it to Mooncake's format."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console
from rich.text import Text

from loadgen.common.formatting import number, percent
from loadgen.common.settings import TraceSettings
from loadgen.load.trace_facts import TraceFacts, facts_of
from loadgen.load.traces import read_trace, scaled, sniff, write_mooncake

DESCRIPTION = "Reads a trace of Mooncake (JSONL), Azure or BurstGPT (CSV) and describes the load."
_BARS = "▁▂▃▄▅▆▇█"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    parser.add_argument("file", metavar="FILE", help="the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="speed, as in `run` (default 1)")
    parser.add_argument("--length-scale", type=float, default=1.0, help="factor of all lengths (default 1)")
    parser.add_argument("--convert", metavar="FILE", help="write it in Mooncake's format")
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def main(arguments: argparse.Namespace) -> int:
    """Prints the description; returns 0."""
    kind = sniff(arguments.file)
    wanted = TraceSettings(
        file=arguments.file, format=kind, speed=arguments.speed, length_scale=arguments.length_scale
    )
    trace = scaled(read_trace(arguments.file, kind), wanted)
    facts = facts_of(trace)
    if arguments.convert:
        write_mooncake(trace, arguments.convert)
    if arguments.json:
        print(json.dumps({"file": arguments.file, "format": kind, **dataclasses.asdict(facts)}))
    else:
        console = Console(highlight=False)
        for line in _lines(kind, facts):
            console.print(Text(line))
    return 0


def _lines(kind: str, facts: TraceFacts) -> list[str]:
    lengths = {"prompt tokens": facts.input_tokens, "output tokens": facts.output_tokens}
    top = max(facts.rates) or 1.0
    return [
        f"{kind}: {facts.requests} requests in {number(facts.seconds)} s"
        + (f", {facts.skipped} without an output skipped" if facts.skipped else ""),
        f"requests/s: {number(facts.mean_rate)} on average, {number(facts.peak_rate)} at most; burstiness "
        f"{number(facts.burstiness)} (1 is Poisson, less is burstier)",
        "".join(_BARS[min(7, int(rate / top * 7.999))] for rate in facts.rates),
        *(
            f"{name}: " + ", ".join(f"{which} {number(value)}" for which, value in spread.items())
            for name, spread in lengths.items()
        ),
        f"prompt tokens in a repeated prefix: {percent(facts.shared_prefix)}",
    ]
