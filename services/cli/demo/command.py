"""`baton demo`: starts a cluster on free ports, streams a few prompts over gRPC, prints a summary."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
from rich.console import Console

from baton.v1 import admin_pb2, admin_pb2_grpc, router_pb2_grpc
from services.cli.demo.prompts import FOR_ANY_MODEL, FOR_THE_DEMO_MODEL, Answer, read_stream
from services.cli.demo.view import Screen, answers_table, shipped_line
from services.cli.status.view import worker_table
from services.cli.up.command import STOP_MARGIN_S, StopSignals, notify_left, require_free_ports
from services.cli.up.local_cluster import Addresses, LocalCluster, Programs
from services.cli.up.model_folder import DEMO, RANDOM
from services.common.config.settings_tree.settings import Settings
from services.common.processes.no_process_left import no_process_left

# Defaults of this command: any free ports, and few log lines.
DEFAULTS = {"router.http_port": "0", "router.grpc_port": "0", "log_level": "warning"}

REQUEST_TIMEOUT_S = 120.0
STATUS_TIMEOUT_S = 10.0
INTERRUPTED = 130
_NOTES = {
    DEMO: "A tiny model of Baton's own, trained to look up, copy, calculate and write JSON.",
    RANDOM: "The weights are random, so the answers are noise; everything else is real.",
}


async def demo(config: Settings, model: Path, programs: Programs | None = None) -> int:
    """Runs the demo. Returns 0 if every prompt was answered, 1 if one was not, 130 after a signal."""
    require_free_ports(config)
    async with no_process_left(notify_left):
        return await _run(config, model, programs)


async def _run(config: Settings, model: Path, programs: Programs | None) -> int:
    console = Console(highlight=False)
    cluster = LocalCluster(config, model, programs)
    signals = StopSignals(cluster)
    try:
        _introduce(console, config)
        addresses = await signals.unless_stopped(cluster.start())
        if addresses is None:
            return INTERRUPTED
        code = await signals.unless_stopped(_show(console, config, addresses))
        return INTERRUPTED if code is None else code
    finally:
        await cluster.stop(config.drain_s + STOP_MARGIN_S)


def _introduce(console: Console, config: Settings) -> None:
    roles = " + ".join(f"{count} {role}" for role, count in config.role_counts.items() if count)
    console.print(f"[bold]Baton demo[/]  {config.served_model_name} on {roles} worker processes and a router")
    if config.model in _NOTES:
        console.print(f"[dim]{_NOTES[config.model]}[/]")
    console.print("[dim]starting …[/]")


async def _show(console: Console, config: Settings, addresses: Addresses) -> int:
    async with (
        grpc.aio.insecure_channel(addresses.grpc) as channel,
        grpc.aio.insecure_channel(addresses.admin) as admin,
    ):
        router = router_pb2_grpc.RouterServiceStub(channel)
        prompts = FOR_THE_DEMO_MODEL if config.model == DEMO else FOR_ANY_MODEL
        answers = [Answer(prompt, number) for number, prompt in enumerate(prompts, 1)]
        with Screen(console, answers) as screen:
            await asyncio.gather(*(_ask(router, config, answer, screen) for answer in answers))
        status = await admin_pb2_grpc.AdminServiceStub(admin).GetStatus(
            admin_pb2.AdminServiceGetStatusRequest(), timeout=STATUS_TIMEOUT_S
        )
    workers = worker_table(list(status.workers), console.width, "workers (slots and blocks: used/all)")
    console.print(answers_table(answers), "", workers, "", shipped_line(status), sep="\n")
    for answer in answers:
        if answer.error:
            console.print(f"[red]prompt {answer.number} failed:[/] {answer.error}")
    return 1 if any(answer.error for answer in answers) else 0


async def _ask(
    router: router_pb2_grpc.RouterServiceAsyncStub, config: Settings, answer: Answer, screen: Screen
) -> None:
    request = answer.prompt.request(config.served_model_name or "", seed=answer.number)
    await read_stream(answer, router.Generate(request, timeout=REQUEST_TIMEOUT_S))
    screen.ended(answer)
