"""`baton audit`: what every worker of a running cluster holds and has shipped."""

from __future__ import annotations

import argparse

import grpc
from google.protobuf import json_format
from rich import box
from rich.console import Console
from rich.table import Table

from baton.cli.settings import invalid
from baton.v1 import router_pb2, router_pb2_grpc, types_pb2

TIMEOUT_S = 10.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="GRPC_ADDRESS", help="host:port of the router's gRPC door")
    parser.add_argument("--json", action="store_true", help="the whole answer as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints the audit; 1 if a worker did not answer or its books do not agree."""
    answer = _fetch(arguments.address)
    if arguments.json:
        print(json_format.MessageToJson(answer, always_print_fields_with_no_presence=True, indent=None))
    else:
        Console().print(audit_table(answer))
    return 1 if any(trouble(worker) for worker in answer.workers) else 0


def _fetch(address: str) -> router_pb2.AuditClusterResponse:
    address = address.removeprefix("grpc://")
    with grpc.insecure_channel(address) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        try:
            return router.AuditCluster(router_pb2.AuditClusterRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            reason = f"{error.code().name} {error.details()}" if isinstance(error, grpc.Call) else str(error)
            raise invalid(f"no audit from {address}: {reason}") from None


def trouble(worker: router_pb2.WorkerAudit) -> str:
    """Why the operator should look at this worker; empty where all is well."""
    return worker.error or worker.audit.integrity_error


def audit_table(answer: router_pb2.AuditClusterResponse) -> Table:
    """One row a worker, within 80 columns."""
    table = plain_table("workers (slots and blocks: free/all)")
    for heading in ("worker", "role", "pids"):
        table.add_column(heading, no_wrap=True)
    for heading in ("slots", "blocks", "prompts", "decoded", "KV out", "KV in"):
        table.add_column(heading, justify="right")
    for worker in answer.workers:
        table.add_row(*_row(worker))
        if trouble(worker):
            table.add_row("", "[red]trouble[/]", trouble(worker))
    return table


def plain_table(title: str) -> Table:
    """A table with a title and a rule under its headings."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _row(worker: router_pb2.WorkerAudit) -> tuple[str, ...]:
    audit, load = worker.audit, worker.audit.load
    return (
        worker.identity.name or worker.address,
        role_name(worker.identity.role),
        f"{audit.front_pid}+{audit.engine_pid}",
        f"{load.free_slots}/{load.slots}",
        f"{load.free_blocks}/{load.blocks}",
        str(audit.prompts_run),
        str(audit.tokens_decoded),
        bytes_text(audit.bytes_shipped),
        bytes_text(audit.bytes_received),
    )


def role_name(role: types_pb2.WorkerRole.ValueType) -> str:
    return types_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


def bytes_text(count: int) -> str:
    """A byte count in the unit that suits it, 1 KiB = 1024 bytes."""
    if count < 1024:
        return f"{count} B"
    size, units = count / 1024, iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"
