"""Output of `baton demo`: live panels on a terminal, finished answers elsewhere, tables at the end."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from baton.v1 import admin_pb2, types_pb2
from services.cli.common.formatting import bytes_text
from services.cli.demo.prompts import Answer
from services.cli.status.view import plain_table


class Screen:
    """Redraws all answers while they grow; without a terminal, prints each once it has ended."""

    def __init__(self, console: Console, answers: list[Answer]) -> None:
        self._console = console
        self._answers = answers
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._panels, refresh_per_second=20)

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def ended(self, answer: Answer) -> None:
        if self._live is None:
            self._console.print(f"{answer.number}. {_short(answer.prompt.text)}", markup=False)
            self._console.print(Padding(Text(_visible(answer.text)), (0, 0, 0, 3), expand=False))

    def _panels(self) -> Group:
        return Group(*(_panel(answer) for answer in self._answers))


def answers_table(answers: list[Answer]) -> Table:
    """A table with one row per prompt, at most 80 columns wide where workers have short names."""
    table = plain_table("prompts (prompt, output: in tokens)")
    for heading in ("", "prompt", "TTFT ms", "TPOT ms", "output", "KV shipped"):
        table.add_column(heading, justify="right")
    for heading in ("prefill", "decode", "ended by"):
        table.add_column(heading)
    for answer in answers:
        table.add_row(str(answer.number), *_cells(answer))
    return table


def _cells(answer: Answer) -> tuple[str, ...]:
    if answer.end is None:
        return ("", "", "", str(answer.tokens), "", "", "", "[red]failed[/]")
    trace = answer.end.trace
    return (
        str(answer.end.usage.prompt_tokens),
        f"{answer.ttft_ms:.1f}",
        f"{answer.tpot_ms:.2f}",
        str(answer.tokens),
        bytes_text(trace.kv_bytes_shipped),
        trace.prefill_worker,
        trace.decode_worker,
        types_pb2.FinishReason.Name(answer.end.finish_reason).removeprefix("FINISH_REASON_").lower(),
    )


def shipped_line(status: admin_pb2.AdminServiceGetStatusResponse) -> str:
    """A line with the KV blocks and bytes that moved between workers, and the handoffs."""
    reports = [worker.worker.report for worker in status.workers]
    blocks = sum(sum(each.blocks_shipped) for each in reports)
    shipped = sum(each.bytes_shipped for each in reports)
    local = sum(each.handoffs_local for each in reports)
    committed = sum(each.handoffs_committed for each in reports)
    lines = []
    if blocks:
        sizes = {size for each in reports for size in each.block_bytes}
        each = f" of {bytes_text(sizes.pop())}" if len(sizes) == 1 else ""
        lines.append(f"KV cache shipped: {blocks} blocks{each} = {bytes_text(shipped)}, {committed} handoffs")
    if local:
        lines.append(f"handoffs within one worker: {local}, no bytes moved")
    return "\n".join(lines) or "no KV cache was handed over"


def _panel(answer: Answer) -> Panel:
    note = f"{answer.tokens} tokens"
    if answer.tokens:
        note = f"TTFT {answer.ttft_ms:.0f} ms · TPOT {answer.tpot_ms:.1f} ms · {note}"
    return Panel(
        Text(_visible(answer.text) or answer.error or "…", style="red" if answer.error else "green"),
        title=Text(f"{answer.number}. {_short(answer.prompt.text)}"),
        title_align="left",
        subtitle=Text(note, style="dim"),
        subtitle_align="right",
        border_style="dim" if answer.end else "cyan",
    )


def _short(prompt: str) -> str:
    """The prompt on one line: its beginning and its end, where a chat prompt has its question."""
    line = " ".join(prompt.split())
    return line if len(line) <= 72 else f"{line[:30].rpartition(' ')[0]} … {line[-40:].partition(' ')[2]}"


def _visible(text: str) -> str:
    """A model's output as one paragraph; control characters, which could control a terminal, become dots."""
    return "".join(
        character if character.isprintable() else " " if character.isspace() else "·" for character in text
    )
