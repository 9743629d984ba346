"""The frame of an HTML report: one file with its style, nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from loadgen.reports.svg import Chart


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure of a page."""

    name: str
    value: str
    more: str = ""


def page(title: str, parts: Iterable[str]) -> str:
    """Returns the whole HTML document."""
    style = resources.files("loadgen.reports").joinpath("style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def heading(title: str, verdict: str, style: str, lines: Sequence[str]) -> str:
    """The title, the verdict, and the target."""
    paragraphs = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines)
    badge = f' <span class="verdict {style}">{escape(verdict)}</span>' if verdict else ""
    return f"<h1>{escape(title)}{badge}</h1>{paragraphs}"


def reasons(lines: Sequence[str], *, caution: bool = False) -> str:
    """Reasons for doubt; empty without any."""
    if not lines:
        return ""
    style = "reasons caution" if caution else "reasons"
    return f'<div class="{style}">' + "".join(f"<p>{escape(line)}</p>" for line in lines) + "</div>"


def tiles(some: Sequence[Tile]) -> str:
    """A row of headline figures."""
    each = "".join(
        f'<div class="tile"><span>{escape(one.name)}</span><b>{escape(one.value)}</b>'
        f"<span>{escape(one.more)}</span></div>"
        for one in some
    )
    return f'<div class="tiles">{each}</div>'


def section(title: str, body: str) -> str:
    """A heading and its contents; empty without contents."""
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def charts(some: Iterable[Chart | None]) -> str:
    """The given charts side by side, as far as they fit."""
    drawn = "".join(f"<div>{chart.render()}</div>" for chart in some if chart is not None)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int | None = None) -> str:
    """A table; cells are HTML; column `words` holds sentences."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="words">{cell}</{tag}>' if place == words else f"<{tag}>{cell}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    names = cells([escape(one) for one in head], "th")
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def folded(title: str, document: dict[str, Any]) -> str:
    """Returns a document as collapsed JSON."""
    text = escape(json.dumps(document, indent=1))
    return f"<details><summary>{escape(title)}</summary><pre>{text}</pre></details>"
