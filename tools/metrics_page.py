"""Writes the tables of docs/metrics.md from the metrics in the code: `python tools/metrics_page.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.cluster.group import metrics as group_metrics
from services.common.observability.metrics import Metric
from services.router.observability import metrics as router_metrics
from services.router.observability.aliases import Aliases
from services.worker.front import metrics as worker_metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_ALIASES = Aliases(router_metrics.FAMILIES)
FAMILIES = {
    "router": router_metrics.FAMILIES,
    "aliases": (*_ALIASES.vllm, *_ALIASES.gen_ai),
    "workers": worker_metrics.FAMILIES,
    "groups": group_metrics.FAMILIES,
}


def with_tables(page: str) -> str:
    """The page with the text between `<!-- NAME -->` and `<!-- end of NAME -->` replaced by that table."""
    for name, families in FAMILIES.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        page = before + begin + _table(families) + end + after
    return page


def _table(families: Iterable[Metric[Any]]) -> str:
    rows = (f"| `{family.name}` | {', '.join(family.labels) or '–'} | {family.help} |" for family in families)
    return "\n".join(["| metric | labels | meaning |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
