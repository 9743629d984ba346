"""`python -m baton.cluster.detached`: SuperviseConfig as JSON on stdin; supervises until SIGTERM.

SIGTERM drains all workers and exits 0. When this process is killed instead, its workers run on, and its next
start adopts them. Exit code 1: Ray was lost or cannot be joined.
"""

from __future__ import annotations

import asyncio
import os
import sys

from baton.cluster.detached.supervisor import DetachedSupervisor
from baton.errors import BatonError
from services.common.config.cluster import SuperviseConfig
from services.common.observability.logs import configure_logs
from services.common.processes.child_protocol import StopSignal, report_ready, run_child

_FAILED = 1


async def serve(config: SuperviseConfig, stop: StopSignal) -> None:
    """Supervises until `stop`. Raises SystemExit(1) where Ray is lost, its reason on stderr."""
    configure_logs(config.cluster.log_level, process="supervisor")
    supervisor = DetachedSupervisor(config)
    stopping = asyncio.create_task(stop.wait())
    running = asyncio.create_task(supervisor.run(stop.install))
    try:
        report_ready({})
        await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await supervisor.drain()
        else:
            running.result()
    except BatonError as error:
        print(f"baton: error: {error.message}", file=sys.stderr, flush=True)
        raise SystemExit(_FAILED) from None
    finally:
        stopping.cancel()
        await supervisor.close()


if __name__ == "__main__":
    try:
        code = run_child(SuperviseConfig, serve)
    except SystemExit as ended:
        code = int(ended.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Ray's own exit handlers would wait for the Ray that has just ended
