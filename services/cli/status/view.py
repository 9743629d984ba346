"""Tables and lines that `baton status` and the demo share; they fit the terminal's width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from baton.v1 import admin_pb2, router_pb2, types_pb2, worker_pb2
from services.cli.common.formatting import bytes_text, duration, short_count

Workers = list[admin_pb2.WorkerStatus]
Count = Callable[[admin_pb2.WorkerStatus], int]
Applies = Callable[[admin_pb2.WorkerStatus], bool]

_STATE_STYLE = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "other pool": "yellow",
    "unreachable": "red",
    "lost": "red",
}
_NONE = "·"
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
}
NO_WORKERS = Text("workers and store: on the router's admin port only (--admin HOST:PORT)", "dim")


def plain_table(title: str = "") -> Table:
    """An empty table with a title and a rule below its headings."""
    return Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


# Characters between two columns, and those of a worker's name that further columns leave.
_GAP, _NAME_WIDTH = 2, 24


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, a worker's cell, and the total; shown if the terminal has at least `width`
    columns and room for it."""

    heading: str
    cell: Callable[[admin_pb2.WorkerStatus], str]
    total: Callable[[Workers], str] = lambda workers: ""
    width: int = 0
    left: bool = False


def worker_table(workers: Workers, width: int, title: str = "") -> Table:
    """One row per worker and, where there are several, one of totals; at most `width` columns wide."""
    columns = _fitting(workers, width)
    table = plain_table(title)
    for column in columns:
        # Only names are shortened, never figures.
        table.add_column(
            column.heading,
            justify="left" if column.left else "right",
            no_wrap=column.heading != "worker",
            overflow="ellipsis",
        )
    for worker in workers:
        table.add_row(*(_styled(column, worker) for column in columns))
    if len(workers) > 1:
        table.add_section()
        table.add_row(*(column.total(workers) for column in columns), style="dim")
    return table


def _fitting(workers: Workers, width: int) -> list[Column]:
    """The columns that fit side by side: those of the widest terminals are left out first."""
    columns = [column for column in COLUMNS if width >= column.width]
    sizes = {column.heading: _size(column, workers) for column in columns}
    while sum(sizes[column.heading] + _GAP for column in columns) - _GAP > width:
        if (last := max(reversed(columns), key=lambda column: column.width)).width == 0:
            break
        columns.remove(last)
    return columns


def _size(column: Column, workers: Workers) -> int:
    """The characters that a column takes, of names as many as are left of them."""
    texts = [column.heading, *map(column.cell, workers), column.total(workers)]
    widest = max(map(len, texts))
    return min(widest, _NAME_WIDTH) if column.cell is name_of else widest


def _styled(column: Column, worker: admin_pb2.WorkerStatus) -> Text:
    cell = column.cell(worker)
    return Text(cell, style=_STATE_STYLE.get(cell, "") if column.heading == "state" else "")


def name_of(worker: admin_pb2.WorkerStatus) -> str:
    """A worker's name, or its address until it has answered."""
    return worker.worker.identity.name or worker.worker.address


def state_name(worker: admin_pb2.WorkerStatus) -> str:
    return admin_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower().replace("_", " ")


def role_name(role: types_pb2.WorkerRole.ValueType) -> str:
    name = types_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()
    return _NONE if name == "unspecified" else name


def decodes(worker: admin_pb2.WorkerStatus) -> bool:
    return worker.worker.identity.role in (types_pb2.WORKER_ROLE_DECODE, types_pb2.WORKER_ROLE_BOTH)


def prefills(worker: admin_pb2.WorkerStatus) -> bool:
    return worker.worker.identity.role in (types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_BOTH)


def steps_of(worker: admin_pb2.WorkerStatus) -> worker_pb2.RecentSteps:
    """The steps of the last second: of decode, or of prefill where the worker only prefills."""
    report = worker.worker.report
    return (
        report.recent_decode if report.recent_decode.steps or not prefills(worker) else report.recent_prefill
    )


def problem(worker: admin_pb2.WorkerStatus) -> str:
    """A problem of this worker that needs an operator; empty if there is none."""
    report = worker.worker.report
    quarantined = sum(link.quarantined_pieces for link in report.links)
    if worker.worker.error:
        return worker.worker.error
    if report.integrity_error:
        return f"integrity check failed: {report.integrity_error}"
    if quarantined:
        return f"{quarantined} staging pieces are quarantined until a broken link's sender ends"
    return ""


def _slots(worker: admin_pb2.WorkerStatus) -> str:
    return _all_slots([worker]) if decodes(worker) and worker.worker.report.load.slots else _NONE


def _all_slots(workers: Workers) -> str:
    loads = [worker.worker.report.load for worker in workers if decodes(worker)]
    return f"{sum(load.slots - load.free_slots for load in loads)}/{sum(load.slots for load in loads)}"


def _blocks(worker: admin_pb2.WorkerStatus) -> str:
    return _all_blocks([worker]) if worker.worker.report.load.blocks else _NONE


def _all_blocks(workers: Workers) -> str:
    loads = [worker.worker.report.load for worker in workers]
    used, blocks = sum(load.blocks - load.free_blocks for load in loads), sum(load.blocks for load in loads)
    return f"{used}/{blocks}" if blocks < 1e5 else f"{short_count(used)}/{short_count(blocks)}"


def _kv_memory(worker: admin_pb2.WorkerStatus) -> str:
    report = worker.worker.report
    if not report.kv_bytes:
        return _NONE
    return f"{bytes_text(report.kv_bytes)} {_DTYPES.get(report.kv_dtype, report.kv_dtype)}"


def _all_kv_memory(workers: Workers) -> str:
    return bytes_text(sum(worker.worker.report.kv_bytes for worker in workers))


def queued(worker: admin_pb2.WorkerStatus) -> int:
    """Prompt tokens that wait for this worker."""
    return max(worker.queued_tokens, worker.worker.report.load.queued_prefill_tokens)


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value else _NONE


def _tokens_per_step(worker: admin_pb2.WorkerStatus) -> str:
    value = worker.worker.report.tokens_per_step
    return f"{value:.2f}" if value else _NONE


def _links(worker: admin_pb2.WorkerStatus) -> str:
    links = worker.worker.report.links
    return str(len(links)) if links else _NONE


def _figures(
    count: Count, applies: Applies, text: Callable[[int], str] = short_count
) -> tuple[Callable[..., str], Callable[..., str]]:
    """Cell and total of a column of counts, for the workers to which it `applies`."""
    return (
        lambda worker: text(count(worker)) if applies(worker) else _NONE,
        lambda workers: text(sum(count(worker) for worker in workers)),
    )


COLUMNS = (
    Column("worker", name_of, lambda workers: f"{len(workers)} workers", left=True),
    Column("role", lambda worker: role_name(worker.worker.identity.role), left=True),
    Column("state", state_name, left=True),
    Column("pool", lambda worker: worker.pool or _NONE, width=120, left=True),
    Column("weights", lambda worker: worker.weight_format or _NONE, width=150, left=True),
    Column("devices", lambda worker: str(worker.worker.report.devices or 1), width=180),
    Column("slots", _slots, _all_slots),
    Column("blocks", _blocks, _all_blocks),
    Column("queue", *_figures(queued, prefills)),
    Column("in/s", *_figures(lambda worker: worker.worker.report.recent_prefill.tokens, prefills)),
    Column("out/s", *_figures(lambda worker: worker.worker.report.recent_decode.tokens, decodes)),
    Column("step ms", lambda worker: _milliseconds(steps_of(worker).mean_ms)),
    Column("p99", lambda worker: _milliseconds(steps_of(worker).p99_ms), width=100),
    Column("tok/step", _tokens_per_step, width=120),
    Column("prompts", *_figures(lambda worker: worker.worker.report.prompts_run, prefills), width=120),
    Column("decoded", *_figures(lambda worker: worker.worker.report.tokens_decoded, decodes), width=120),
    Column(
        "KV out",
        *_figures(lambda worker: worker.worker.report.bytes_shipped, prefills, bytes_text),
        width=120,
    ),
    Column(
        "KV in", *_figures(lambda worker: worker.worker.report.bytes_received, decodes, bytes_text), width=120
    ),
    Column("links", _links, width=120),
    Column(
        "pids",
        lambda worker: f"{worker.worker.report.front_pid}+{worker.worker.report.engine_pid}",
        width=150,
    ),
    Column("KV memory", _kv_memory, _all_kv_memory, width=175),
    Column("metrics", lambda worker: worker.metrics_address or _NONE, width=190),
)


def headline(router: router_pb2.RouterStatus) -> Text:
    """The model, whether it is served, the uptime, and the error rate."""
    verdict = ("serving", "green") if router.serving else ("not serving", "bold red")
    line = Text.assemble((router.model, "bold"), " ", verdict, f"; up {duration(router.uptime_s)}")
    if router.errors_per_s:
        line.append(f"; {router.errors_per_s:.2g} errors/s", "red")
    return line


def rates_line(router: router_pb2.RouterStatus) -> Text:
    """The line of running and waiting requests, and of rates within the window."""
    return Text.assemble(
        f"{short_count(router.running)} running, {short_count(router.waiting)} waiting; ",
        f"last {router.window_s:.0f} s: ",
        (f"{short_count(router.requests_per_s)} req/s", "bold"),
        f", tokens/s {short_count(router.prompt_tokens_per_s)} in ",
        (f"{short_count(router.completion_tokens_per_s)} out", "bold"),
    )


def latency_table(router: router_pb2.RouterStatus) -> Table:
    """p50 and p99 of the window's latencies, in milliseconds."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(5):
        grid.add_column(justify="right", no_wrap=True)
    named = (("TTFT", router.ttft), ("TPOT", router.tpot), ("ITL", router.itl), ("queue", router.queue))
    grid.add_row("", *(Text(f"{name} ms", "dim") for name, _ in named))
    for share in ("p50", "p99"):
        grid.add_row(Text(share, "dim"), *(_latency(latency, share) for _, latency in named))
    return grid


def _latency(latency: router_pb2.Latency, share: str) -> str:
    if not latency.count:
        return _NONE
    value = latency.p50_ms if share == "p50" else latency.p99_ms
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def problems(workers: Workers) -> Iterator[Text]:
    """One line for each worker with a problem."""
    for worker in workers:
        if reason := problem(worker):
            yield Text.assemble((name_of(worker), "bold red"), ": ", reason)
        for link in worker.failed_links:
            times = "once" if link.failures == 1 else f"{link.failures} times in a row"
            again = f"in {link.retry_in_s:.0f} s" if link.retry_in_s >= 1 else "now"
            failed = f": its link to {link.decode} failed {times}, and is used again {again}: {link.reason}"
            yield Text.assemble((name_of(worker), "bold red"), failed)


def device_lines(workers: Workers) -> Iterator[Text]:
    """One line for each worker of several devices: their memory when its start had ended."""
    for worker in workers:
        devices = worker.worker.report.device_memory
        if len(devices) > 1:
            gpus = any(device.total_bytes for device in devices)
            sizes = {"weights": [device.weights_bytes for device in devices]}
            sizes["KV"] = [device.kv_bytes for device in devices]
            if gpus:
                sizes["free"] = [device.total_bytes - device.used_bytes for device in devices]
            memory = "; ".join(f"{use} {_each(counts)}" for use, counts in sizes.items())
            kind, indexes = "GPUs" if gpus else "devices", ", ".join(str(one.index) for one in devices)
            yield Text.assemble((name_of(worker), "bold"), f" on {kind} {indexes}: {memory}")


def _each(counts: list[int]) -> str:
    """Bytes of each device; once where all have as many."""
    texts = [bytes_text(count) for count in counts]
    return f"{texts[0]} each" if len(set(texts)) == 1 else ", ".join(texts)


def experts_line(workers: Workers) -> Text | None:
    """The parameters of a mixture of experts, and how evenly its experts are taken; None for other models."""
    mixtures = [one.worker.report.experts for one in workers if one.worker.report.HasField("experts")]
    if not mixtures:
        return None
    first, busiest = mixtures[0], max(one.imbalance for one in mixtures)
    total, active = (_billions(count) for count in (first.total_parameters, first.active_parameters))
    line = Text(f"{total} total, {active} active: a token takes {first.taken} of {first.count} experts")
    return line.append(f"; the busiest has {busiest:.1f} x the mean" if busiest else "")


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.2g}M"


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
