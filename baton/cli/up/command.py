"""`baton up`: start everything, say READY, stay until told to stop.

starting → serving → draining → gone
    │         │          └ a second signal: stop at once
    │         ├ the router ends unasked: start it again
    │         └ the workers' process ends unasked, or the router for good: stop everything, exit code 1
    └ a child refuses or a signal comes: stop what runs
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

from baton.addresses import join_address
from baton.cli.common.messages import say, write_line
from baton.cli.up.first_of import race
from baton.cli.up.local_cluster import Doors, LocalCluster, Programs
from baton.cli.up.settings import invalid
from services.common.config.up import UpConfig
from services.common.processes.process_tree import Orphans, adopt_orphans, kill_descendants

T = TypeVar("T")

# What a stop takes beyond the drain: the workers end once the router has, and then the last are killed.
STOP_MARGIN_S = 5.0
# After a child's death there is little to wait for: its requests cannot end well.
FAILURE_STOP_S = 10.0
# For what a killed child has left: Ray's own processes, where its warden did not come to it.
SWEEP_S = 5.0
# A killed worker's engine stays in the process table for twice as long at most.
REAP_S = 2.0


class StopSignals:
    """SIGTERM and SIGINT: the first is `asked`, and each later one calls `at_once`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._at_once: list[LocalCluster] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def kill_on_second(self, cluster: LocalCluster) -> None:
        self._at_once.append(cluster)

    def _on_signal(self) -> None:
        if self.asked.is_set():
            for cluster in self._at_once:
                cluster.kill()
        self.asked.set()

    async def unless_asked(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None, with `work` cancelled, if a signal comes first."""
        result, _ = await race(work, self.asked.wait())
        return result


async def up(config: UpConfig, model: Path, programs: Programs | None = None) -> int:
    """Runs a cluster until a signal (0) or a failure that restarts do not mend (1).

    Raises what `LocalCluster.start` raises.
    """
    require_free_ports(config)
    try:
        async with nothing_left():
            return await _run(config, model, programs)
    finally:
        say("stopped")


async def _run(config: UpConfig, model: Path, programs: Programs | None) -> int:
    signals = StopSignals()
    cluster = LocalCluster(config, model, programs)
    signals.kill_on_second(cluster)
    stop_s = FAILURE_STOP_S
    try:
        roles = ", ".join(f"{count} {role}" for role, count in config.role_counts.items() if count)
        say(f"starting {roles} for {config.served_model_name} ({model})")
        doors = await signals.unless_asked(cluster.start())
        if doors is not None:
            _announce(doors)
            failure = await signals.unless_asked(cluster.failure())
            if failure is not None:
                say(f"error: {failure}; stopping")
                return 1
            stop_s = config.drain_s + STOP_MARGIN_S
            say("draining")
        return 0
    finally:
        await cluster.stop(stop_s)


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No process that the block starts stays behind, in whatever session and however orphaned; one that ends
    as an orphan does not stay in the process table either."""
    adopt_orphans()
    reaping = asyncio.create_task(_reap_orphans())
    try:
        yield
    finally:
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)
        if left := kill_descendants(SWEEP_S):
            say(f"error: processes that cannot be killed: {left}")


async def _reap_orphans() -> None:
    orphans = Orphans()
    while True:
        await asyncio.sleep(REAP_S)
        orphans.reap()


def _announce(doors: Doors) -> None:
    """Writes the one line of stdout; a closed stdout is no error."""
    write_line(sys.stdout, f"READY http={doors.http} grpc={doors.grpc} admin={doors.admin}")
    say(
        f"ready: OpenAI-style HTTP on http://{doors.http}/v1, gRPC on {doors.grpc}; "
        f"metrics on http://{doors.admin_http}/metrics, baton status --admin {doors.admin}; stop with Ctrl-C"
    )


def require_free_ports(config: UpConfig) -> None:
    """Finds a port that is taken or named twice before minutes of loading weights.

    Raises `BatonError(INVALID)` with the port and its flag.
    """
    router = config.router
    admin_grpc_port, admin_http_port = router.admin_ports
    wanted = (
        (router.host, router.http_port, "--http-port"),
        (router.host, router.grpc_port, "--grpc-port"),
        (router.admin_host, admin_grpc_port, "--admin-grpc-port"),
        (router.admin_host, admin_http_port, "--admin-http-port"),
    )
    flags: dict[int, str] = {}
    for host, port, flag in wanted:
        if port in flags:
            raise invalid(f"port {port} is named for both {flags[port]} and {flag}")
        if port:
            flags[port] = flag
            require_free(host, port, flag)


def require_free(host: str, port: int, flag: str) -> None:
    """`BatonError(INVALID)` where somebody listens on that port already."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise invalid(f"cannot listen on {join_address(host, port)} ({flag}): {error.strerror}") from None
