"""The line about Redis in `baton status` and `baton top`."""

from __future__ import annotations

from rich.text import Text

from baton.cli.common.formatting import duration, short_count
from baton.v1 import admin_pb2


def store_line(status: admin_pb2.AdminServiceGetStatusResponse) -> Text:
    """Address, contents and availability of the Redis that holds registry and journal."""
    store = status.store
    if not status.HasField("store"):
        return Text("Redis: none; no registry and no journal", "dim")
    line = Text.assemble("Redis: ", (store.address, "bold"), ", embedded" if store.embedded else "")
    if store.restarts:
        line.append(f", restarted {store.restarts} x", "yellow")
    line.append(f"; namespace {store.namespace}")
    if store.HasField("unavailable_s"):
        line.append(f"; unavailable for {duration(store.unavailable_s)}", "bold red").append(
            ", requests continue without it"
        )
    else:
        line.append(f"; workers registered: {store.registered_workers}, {_journal(store)}")
    return line


def store_problem(status: admin_pb2.AdminServiceGetStatusResponse) -> Text | None:
    """The line if Redis is unavailable, else None."""
    return store_line(status) if status.store.HasField("unavailable_s") else None


def _journal(store: admin_pb2.StoreStatus) -> str:
    if not store.HasField("journal_open"):
        return "the journal does not answer"
    return f"requests in the journal: {short_count(store.journal_open)}"
