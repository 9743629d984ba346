"""`baton drain`: stops new work for one worker or for the router, or accepts it again."""

from __future__ import annotations

import argparse

from baton.v1 import admin_pb2
from services.cli.common.admin_call import TIMEOUT_S, add_admin_flag, admin_call


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("worker", nargs="?", metavar="WORKER", help="name or address, as baton status shows it")
    what.add_argument("--router", action="store_true", help="drain the router: it refuses new requests")
    parser.add_argument("--resume", action="store_true", help="end the drain: accept new work again")
    add_admin_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Starts or ends the drain and prints what still runs. Raises BatonError where the router does not answer
    or knows no such worker."""
    request = admin_pb2.DrainRequest(worker=arguments.worker or "", resume=arguments.resume)
    answer = admin_call(
        arguments.admin,
        lambda stub, metadata: stub.Drain(request, timeout=TIMEOUT_S, metadata=metadata),
    )
    state = "accepts new work" if arguments.resume else "draining"
    print(
        f"{arguments.worker or 'router'}: {state}; requests running: {answer.running}, "
        f"prompt tokens queued: {answer.queued_tokens}"
    )
    return 0
