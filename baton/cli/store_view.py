"""How `baton status` and `baton top` speak of the Redis that has registry and journal."""

from __future__ import annotations

from rich.text import Text

from baton.cli.figures import duration, short_count
from baton.v1 import router_pb2


def store_line(router: router_pb2.RouterStatus) -> Text:
    """Where it is, what it has, and whether it answers."""
    store = router.store
    if not router.HasField("store"):
        return Text("Redis: none; neither registry nor journal", "dim")
    line = Text.assemble("Redis: ", (store.address, "bold"), ", embedded" if store.embedded else "")
    if store.restarts:
        line.append(f", started again {store.restarts} x", "yellow")
    line.append(f"; namespace {store.namespace}")
    if store.HasField("away_s"):
        line.append(f"; away for {duration(store.away_s)}", "bold red").append(", requests go on without it")
    else:
        line.append(f"; workers registered: {store.registered_workers}, {_journal(store)}")
    return line


def store_trouble(router: router_pb2.RouterStatus) -> Text | None:
    """The same where an operator should know of it."""
    return store_line(router) if router.store.HasField("away_s") else None


def _journal(store: router_pb2.StoreStatus) -> str:
    if not store.HasField("journal_open"):
        return "its journal does not answer"
    return f"requests in the journal: {short_count(store.journal_open)}"
