"""`baton ray stop-workers`: drains the workers of this container before Ray ends them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time

from baton.base.errors import BatonError, ErrorKind
from services.cli.common.messages import notify
from services.common.processes.run_folder import RunFolder

FAILED = 1
_POLL_S = 0.05


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--within", required=True, type=_seconds, metavar="SECONDS", help="longest wait for workers to drain"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 once all workers of this container have ended, 1 where some run on after the deadline.

    Raises BatonError(UNAVAILABLE) where the folder that lists them cannot be used.
    """
    folder = RunFolder.of_node(os.environ)
    try:
        left = stop_workers(folder, arguments.within)
    except OSError as error:
        raise BatonError(ErrorKind.UNAVAILABLE, f"cannot use {error.filename}: {error.strerror}") from None
    if left:
        notify(f"error: after {arguments.within:g} s these workers still run: {', '.join(left)}")
    return FAILED if left else 0


def stop_workers(folder: RunFolder, within_s: float) -> list[str]:
    """Marks the node as stopping and sends each worker one SIGTERM; the names of those that still run
    after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    folder.mark_stopping()
    signalled: set[int] = set()
    while workers := folder.workers():
        for pid in set(workers.values()) - signalled:
            signalled.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return list(workers)
