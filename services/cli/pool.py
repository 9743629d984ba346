"""`baton pool`: lists the pools of workers that a router knows, and switches the current one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from baton.v1 import admin_pb2
from services.cli.common.admin_call import TIMEOUT_S, add_admin_flag, admin_call
from services.cli.status.command import console
from services.cli.status.view import plain_table

_SHORT_DIGEST = 6  # bytes


def add_flags(parser: argparse.ArgumentParser, parser_class: type[argparse.ArgumentParser]) -> None:
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="pool_command", parser_class=parser_class
    )
    listing = commands.add_parser("list", help="list all pools, their properties, and which one is current")
    listing.set_defaults(pool=None)
    switching = commands.add_parser(
        "switch", help="send new requests to another pool; running requests finish in theirs"
    )
    switching.add_argument("pool", metavar="POOL", help="its id, as baton pool list shows it")
    for one in (listing, switching):
        add_admin_flag(one)


def run(arguments: argparse.Namespace) -> int:
    """Switches the pool if requested, and prints all pools.

    Raises BatonError where the router does not answer, knows no such pool, or cannot serve from it.
    """
    if arguments.pool is None:
        status = admin_pb2.AdminServiceGetStatusRequest()
        pools: Iterable[admin_pb2.PoolStatus] = admin_call(
            arguments.admin,
            lambda stub, metadata: stub.GetStatus(status, timeout=TIMEOUT_S, metadata=metadata),
        ).pools
    else:
        request = admin_pb2.SwitchPoolRequest(pool=arguments.pool)
        pools = admin_call(
            arguments.admin,
            lambda stub, metadata: stub.SwitchPool(request, timeout=TIMEOUT_S, metadata=metadata),
        ).pools
    _show(pools)
    return 0


def _show(pools: Iterable[admin_pb2.PoolStatus]) -> None:
    table = plain_table()
    for heading in _COLUMNS:
        right = heading in ("workers", "requests")
        table.add_column(heading, no_wrap=True, justify="right" if right else "left")
    for pool in pools:
        table.add_row(*(cell(pool) for cell in _COLUMNS.values()))
    console().print(table)


def _state(one: admin_pb2.PoolStatus) -> str:
    if one.current:
        return "current" if one.ready else "current, not ready"
    if not one.compatible:
        return "other name or tokenizer"
    return "ready" if one.ready else "not ready"


_COLUMNS: dict[str, Callable[[admin_pb2.PoolStatus], str]] = {
    "pool": lambda one: one.id,
    "state": _state,
    "workers": lambda one: str(one.workers),
    "requests": lambda one: str(one.running),
    "checkpoint": lambda one: one.pool.checkpoint[:_SHORT_DIGEST].hex(),
    "tokenizer": lambda one: one.pool.tokenizer[:_SHORT_DIGEST].hex(),
    "KV": lambda one: one.pool.kv_format,
    "numerics": lambda one: one.pool.numerics,
    "model": lambda one: one.pool.model,
}
