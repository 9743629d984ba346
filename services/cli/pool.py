"""`baton pool`: lists the pools of workers that a router knows, and switches the current one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from baton.v1 import admin_pb2
from services.cli.common.admin_call import TIMEOUT_S, add_admin_flag, admin_call
from services.cli.common.console import console
from services.cli.status.view import plain_table

_SHORT_DIGEST = 6  # bytes
_GAP = 2  # columns of a terminal between two of a table
_LEFT_OUT_FIRST = ("tokenizer", "checkpoint", "numerics", "KV", "model")


def add_list_flags(parser: argparse.ArgumentParser) -> None:
    add_admin_flag(parser)


def add_switch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL", help="its id, as baton pool list shows it")
    add_admin_flag(parser)


def show_pools(arguments: argparse.Namespace) -> int:
    """Prints all pools. Raises BatonError where the router does not answer."""
    request = admin_pb2.AdminServiceGetStatusRequest()
    answer = admin_call(
        arguments.admin,
        lambda stub, metadata: stub.GetStatus(request, timeout=TIMEOUT_S, metadata=metadata),
    )
    _show(answer.pools)
    return 0


def switch_pool(arguments: argparse.Namespace) -> int:
    """Switches the pool, and prints all pools.

    Raises BatonError where the router does not answer, knows no such pool, or cannot serve from it.
    """
    request = admin_pb2.SwitchPoolRequest(pool=arguments.pool)
    answer = admin_call(
        arguments.admin,
        lambda stub, metadata: stub.SwitchPool(request, timeout=TIMEOUT_S, metadata=metadata),
    )
    _show(answer.pools)
    return 0


def _show(pools: Iterable[admin_pb2.PoolStatus]) -> None:
    """Prints a table, on a narrow terminal without the columns in which pools differ least."""
    screen, listed = console(), list(pools)
    cells = {heading: [cell(pool) for pool in listed] for heading, cell in _COLUMNS.items()}
    widths = {heading: max(map(len, (heading, *column))) for heading, column in cells.items()}
    for heading in _LEFT_OUT_FIRST:
        if sum(widths.values()) + _GAP * (len(widths) - 1) > screen.width:
            del widths[heading]
    table = plain_table()
    for heading in widths:
        right = heading in ("workers", "requests")
        table.add_column(heading, no_wrap=True, justify="right" if right else "left")
    for row in zip(*(cells[heading] for heading in widths), strict=True):
        table.add_row(*row)
    screen.print(table)


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
