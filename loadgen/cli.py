"""The `loadgen` command: a Poisson open loop of random prompts against a gRPC door."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc.aio
from rich.console import Console

from baton.v1 import router_pb2_grpc
from loadgen.arrivals import poisson
from loadgen.client import Record, Target, send
from loadgen.prompts import random_token_ids
from loadgen.report import Report

CONNECT_TIMEOUT_S = 10.0

N = TypeVar("N", int, float)

RUN_DESCRIPTION = (
    "Poisson arrivals in an open loop; random token ids; greedy, end of sequence ignored. "
    "TTFT counts from the scheduled send. Failed requests are counted and never sent again."
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every request was answered, 1 when some failed, 2 when there was nothing to measure."""
    arguments = _parser().parse_args(argv)
    try:
        records = asyncio.run(run(arguments))
    except TimeoutError:
        print(f"loadgen: error: nobody answers at {arguments.target}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    report = Report.of(records, arguments.rate)
    if arguments.json:
        print(json.dumps({"settings": _settings(arguments), **report.as_dict()}))
    else:
        Console(highlight=False).print(report.headline(), report.table(), sep="\n")
    return 1 if report.failed else 0


async def run(arguments: argparse.Namespace) -> list[Record]:
    """Sends every request at its time, whatever became of the earlier ones. TimeoutError: no connection."""
    target = Target(arguments.model, arguments.output_len, arguments.timeout)
    prompts = random_token_ids(
        arguments.input_len, arguments.num_requests, arguments.vocab_size, arguments.seed
    )
    records: list[Record] = []
    async with grpc.aio.insecure_channel(arguments.target.removeprefix("grpc://")) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        router = router_pb2_grpc.RouterServiceStub(channel)
        start = time.monotonic()
        async with asyncio.TaskGroup() as sending:
            times = poisson(arguments.rate, arguments.num_requests, arguments.seed)
            for offset, token_ids in zip(times, prompts, strict=True):
                records.append(Record(scheduled=start + offset))
                await asyncio.sleep(max(0.0, records[-1].scheduled - time.monotonic()))
                sending.create_task(send(router, target, token_ids, records[-1]))
    return records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen", description="Measures a streamed language model under load."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="one run at one rate", description=RUN_DESCRIPTION)
    run.add_argument("target", metavar="grpc://HOST:PORT")
    run.add_argument("--model", required=True)
    run.add_argument("--rate", type=_positive(float), default=1.0, help="requests a second (default 1)")
    run.add_argument("--num-requests", type=_positive(int), default=20, metavar="N", help="default 20")
    run.add_argument("--input-len", type=_positive(int), default=64, metavar="TOKENS", help="default 64")
    run.add_argument("--output-len", type=_positive(int), default=32, metavar="TOKENS", help="default 32")
    run.add_argument(
        "--vocab-size",
        type=_positive(int),
        default=256,
        metavar="N",
        help="ids are drawn below it (default 256)",
    )
    run.add_argument("--seed", type=_seed, default=0, help="of arrivals and prompts (default 0)")
    run.add_argument(
        "--timeout", type=_positive(float), default=300.0, metavar="S", help="a request's deadline"
    )
    run.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _positive(kind: Callable[[str], N]) -> Callable[[str], N]:
    def parse(text: str) -> N:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    return parse


def _seed(text: str) -> int:
    if not 0 <= (seed := int(text)) < 2**64:
        raise argparse.ArgumentTypeError(f"{text} is not an unsigned 64-bit number")
    return seed


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(arguments).items() if name != "json"}
