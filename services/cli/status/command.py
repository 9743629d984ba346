"""`baton status`: prints once whether a cluster serves, its rates and latencies, and the state of its
workers."""

from __future__ import annotations

import argparse
import asyncio
import math

from google.protobuf import json_format
from rich.console import Console

from baton.base.errors import BatonError, ErrorKind
from baton.v1 import admin_pb2
from services.cli.common.admin_call import TIMEOUT_S, add_admin_flag
from services.cli.common.console import console
from services.cli.status import watch
from services.cli.status.slow_worker import slow_worker
from services.cli.status.source import CANNOT_SERVE, StatusSource, is_partial
from services.cli.status.view import (
    NO_WORKERS,
    device_lines,
    experts_line,
    headline,
    latency_table,
    problems,
    rates_line,
    store_line,
    worker_table,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="?",
        metavar="GRPC_ADDRESS",
        help="host:port of the router's public gRPC port; shows totals only, unless the admin port is known",
    )
    add_admin_flag(parser)
    parser.add_argument(
        "--window",
        type=seconds,
        default=10,
        metavar="SECONDS",
        help="window of rates and latencies, 1 to 60 (default 10)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the response as one JSON object")
    form.add_argument("--watch", action="store_true", help="refresh until q is pressed, with a map of slots")
    watch.add_flags(parser)


def seconds(text: str) -> int:
    """Parses a window of 1 to 60 seconds."""
    value = float(text)
    if not (math.isfinite(value) and 1 <= value <= 60):
        raise argparse.ArgumentTypeError("between 1 and 60 seconds")
    return round(value)


def run(arguments: argparse.Namespace) -> int:
    """Prints the status, once or repeatedly; returns 1 if the cluster cannot serve or a worker's integrity
    check failed. Raises BatonError where the router does not answer."""
    if arguments.watch:
        return watch.run(arguments)
    if arguments.once or arguments.interval is not None:
        raise BatonError(ErrorKind.INVALID, "--interval and --once go with --watch")
    answer = asyncio.run(fetch(StatusSource(arguments.address, arguments.admin), arguments.window))
    if arguments.json:
        print(json_format.MessageToJson(answer, always_print_fields_with_no_presence=True, indent=None))
    else:
        show(console(), answer)
    consistent = all(not worker.worker.report.integrity_error for worker in answer.workers)
    return 0 if answer.router.serving and consistent else CANNOT_SERVE


async def fetch(source: StatusSource, window_s: int) -> admin_pb2.AdminServiceGetStatusResponse:
    """The status, with an integrity check of every worker. Raises BatonError where the router does not
    answer."""
    request = admin_pb2.AdminServiceGetStatusRequest(window_s=window_s, check_integrity=True)
    async with source:
        return await source.get(request, TIMEOUT_S)


def show(screen: Console, answer: admin_pb2.AdminServiceGetStatusResponse) -> None:
    """Prints headline, latencies, workers, and problems that need an operator."""
    router = answer.router
    screen.print(headline(router), rates_line(router), latency_table(router), "", sep="\n")
    if is_partial(answer):
        screen.print(NO_WORKERS)
        return
    screen.print(worker_table(list(answer.workers), screen.width, "workers (slots and blocks: used/all)"))
    if mixture := experts_line(list(answer.workers)):
        screen.print(mixture)
    for line in device_lines(list(answer.workers)):
        screen.print(line)
    screen.print("", store_line(answer), sep="\n")
    for line in problems(list(answer.workers)):
        screen.print(line)
    if slow := slow_worker(list(answer.workers)):
        screen.print(slow.line())
