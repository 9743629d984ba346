"""`baton up`: starts everything, writes READY, runs until it is stopped.

starting → serving → draining → ended
    │         │          └ a second signal: stop at once
    │         ├ the router ends unexpectedly: restart it
    │         └ the workers' process ends unexpectedly, or the router too often: stop everything, exit code 1
    └ a child refuses to start, or a signal: stop everything
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

from services.cli.common.free_port import require_free
from services.cli.common.messages import notify, write_line
from services.cli.up.local_cluster import Addresses, LocalCluster, Programs, first_of
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.settings import Settings
from services.common.processes.no_process_left import no_process_left

T = TypeVar("T")

# Time for a stop beyond the drain: the workers end after the router, and then what is left is killed.
STOP_MARGIN_S = 5.0
# Time for a stop after a child's death: its requests cannot succeed.
FAILURE_STOP_S = 10.0


class StopSignals:
    """SIGTERM and SIGINT: the first sets `requested`, each later one kills the cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.requested = asyncio.Event()
        self._cluster = cluster
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.requested.is_set():
            self._cluster.kill()
        self.requested.set()

    async def unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None, with `work` cancelled, if a signal arrives first."""
        result, _ = await first_of(work, self.requested.wait())
        return result


async def up(config: Settings, model: Path, programs: Programs | None = None) -> int:
    """Runs a cluster. Returns 0 after a signal, 1 after a failure that restarts do not mend.

    Raises what `LocalCluster.start` raises.
    """
    require_free_ports(config)
    try:
        async with no_process_left(notify_left):
            return await _run(config, model, programs)
    finally:
        notify("stopped")


async def _run(config: Settings, model: Path, programs: Programs | None) -> int:
    cluster = LocalCluster(config, model, programs)
    signals = StopSignals(cluster)
    stop_s = FAILURE_STOP_S
    try:
        roles = ", ".join(f"{count} {role}" for role, count in config.role_counts.items() if count)
        notify(f"starting {roles} for {config.served_model_name} ({model})")
        addresses = await signals.unless_stopped(cluster.start())
        if addresses is not None:
            _announce(addresses)
            failure = await signals.unless_stopped(cluster.failure())
            if failure is not None:
                notify(f"error: {failure}; stopping")
                return 1
            stop_s = config.drain_s + STOP_MARGIN_S
            notify("draining")
        return 0
    finally:
        await cluster.stop(stop_s)


def notify_left(pids: Sequence[int]) -> None:
    """Reports processes that `no_process_left` cannot kill."""
    notify(f"error: cannot kill the processes {list(pids)}")


def _announce(addresses: Addresses) -> None:
    """Writes the READY line to stdout, and the same for people to stderr."""
    write_line(
        sys.stdout,
        f"READY http={addresses.http} grpc={addresses.grpc} admin={addresses.admin} "
        f"admin_http={addresses.admin_http}",
    )
    notify(
        f"ready: OpenAI-compatible HTTP on http://{addresses.http}/v1, gRPC on {addresses.grpc}; "
        f"metrics on http://{addresses.admin_http}/metrics, baton status --admin {addresses.admin}; "
        "stop with Ctrl-C"
    )


def require_free_ports(config: Settings) -> None:
    """Checks that the router's ports are free and distinct, before weights are loaded.

    Raises `BatonError(INVALID)` with the port and its flag.
    """
    router = config.router
    admin_grpc_port, admin_http_port = router.admin_ports
    wanted = (
        (router.host, router.http_port, "--http-port"),
        (router.host, router.grpc_port, "--grpc-port"),
        (router.admin_host, admin_grpc_port, "--admin-grpc-port"),
        (router.bound_admin_http_host, admin_http_port, "--admin-http-port"),
    )
    flags: dict[int, str] = {}
    for host, port, flag in wanted:
        if port in flags:
            raise invalid(f"port {port} is named for both {flags[port]} and {flag}")
        if port:
            flags[port] = flag
            require_free(host, port, flag)
