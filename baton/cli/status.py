"""`baton status`: whether a cluster serves, what its workers hold, and how it fares, once."""

from __future__ import annotations

import argparse
import math
import os

import grpc
from google.protobuf import json_format
from rich.console import Console

from baton.cli.messages import say
from baton.cli.slow_worker import slow_worker
from baton.cli.status_view import headline, latency_table, rates_line, troubles, worker_table
from baton.cli.store_view import store_line
from baton.v1 import router_pb2, router_pb2_grpc

TIMEOUT_S = 10.0
CANNOT_SERVE = 1
# Nobody reads a file or a pipe at the width of a terminal.
_PIPE_WIDTH = 160


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")


def add_address(parser: argparse.ArgumentParser) -> None:
    """What `status` and `top` both take."""
    parser.add_argument("address", metavar="GRPC_ADDRESS", help="host:port of the router's gRPC door")
    parser.add_argument(
        "--window", type=seconds, default=10, metavar="SECONDS", help="what rates and latencies are of"
    )


def seconds(text: str) -> int:
    """A whole number of seconds that a router remembers."""
    value = float(text)
    if not (math.isfinite(value) and 1 <= value <= 60):
        raise argparse.ArgumentTypeError("between 1 and 60 seconds")
    return round(value)


def run(arguments: argparse.Namespace) -> int:
    """Prints the status; 1 if the cluster cannot serve or a worker's books do not agree."""
    answer = fetch(arguments.address, arguments.window)
    if answer is None:
        return CANNOT_SERVE
    if arguments.json:
        print(json_format.MessageToJson(answer, always_print_fields_with_no_presence=True, indent=None))
    else:
        show(console(), answer)
    books = all(not worker.worker.audit.integrity_error for worker in answer.workers)
    return 0 if answer.router.serving and books else CANNOT_SERVE


def console() -> Console:
    """The terminal, or a wide page where there is none."""
    plain = Console(highlight=False)
    if plain.is_terminal or "COLUMNS" in os.environ:
        return plain
    return Console(highlight=False, width=_PIPE_WIDTH)


def fetch(address: str, window_s: int) -> router_pb2.GetStatusResponse | None:
    """The status with books checked; None, once told why, where the router does not answer."""
    address = address.removeprefix("grpc://")
    request = router_pb2.GetStatusRequest(window_s=window_s, check_integrity=True)
    with grpc.insecure_channel(address) as channel:
        try:
            return router_pb2_grpc.RouterServiceStub(channel).GetStatus(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            reason = f"{error.code().name} {error.details()}" if isinstance(error, grpc.Call) else str(error)
            say(f"error: no status from {address}: {reason}")
            return None


def show(screen: Console, answer: router_pb2.GetStatusResponse) -> None:
    """Headline, latencies, workers, and what needs an operator."""
    router = answer.router
    screen.print(headline(router), rates_line(router), latency_table(router), "", sep="\n")
    screen.print(worker_table(list(answer.workers), screen.width, "workers (slots and blocks: used/all)"))
    screen.print("", store_line(router), sep="\n")
    for line in troubles(list(answer.workers)):
        screen.print(line)
    if slow := slow_worker(list(answer.workers)):
        screen.print(slow.line())
