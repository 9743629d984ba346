"""How `baton status` and `baton top` show the Redis that holds the registry and the journal."""

from __future__ import annotations

from rich.text import Text

from baton.cli.common.figures import duration, short_count
from baton.v1 import admin_pb2


def store_line(status: admin_pb2.AdminServiceGetStatusResponse) -> Text:
    """Where it is, what it has, and whether it answers."""
    store = status.store
    if not status.HasField("store"):
        return Text("Redis: none; neither registry nor journal", "dim")
    line = Text.assemble("Redis: ", (store.address, "bold"), ", embedded" if store.embedded else "")
    if store.restarts:
        line.append(f", started again {store.restarts} x", "yellow")
    line.append(f"; namespace {store.namespace}")
    if store.HasField("unavailable_s"):
        line.append(f"; away for {duration(store.unavailable_s)}", "bold red").append(", requests go on without it")
    else:
        line.append(f"; workers registered: {store.registered_workers}, {_journal(store)}")
    return line


def store_trouble(status: admin_pb2.AdminServiceGetStatusResponse) -> Text | None:
    """The same where an operator should know of it."""
    return store_line(status) if status.store.HasField("unavailable_s") else None


def _journal(store: admin_pb2.StoreStatus) -> str:
    if not store.HasField("journal_open"):
        return "its journal does not answer"
    return f"requests in the journal: {short_count(store.journal_open)}"
