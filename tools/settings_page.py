"""Writes the tables of docs/configuration.md from the tree of settings: `python tools/settings_page.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from services.common.config.settings_tree.listing import Setting, settings_of

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
# The sections of the tree that each table has; what is directly at the root has the table "cluster".
TABLES = {
    "engine": ("engine",),
    "transfer": ("transfer",),
    "router": ("router",),
    "stored responses": ("router.stored_responses",),
    "connections": ("router.connections",),
    "access": ("auth", "tls.internal", "tls.public", "require_tls"),
    "supervision and state": ("supervision", "state"),
    "tracing": ("tracing",),
    "processes of their own": ("worker", "model_source"),
}
_HEAD = "| setting | default | unit or values | who | flag | meaning |\n" + "|---" * 6 + "|\n"


def with_tables(page: str) -> str:
    """The page with the text between the marks of each table replaced by the table."""
    for name, table in tables().items():
        before, begin, rest = page.partition(f"<!-- settings: {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of settings: {name} -->")
        page = before + begin + table + end + after
    return page


def tables() -> dict[str, str]:
    """The tables by name: first of those that everyone needs, last of what is no setting any more."""
    public = [one for one in settings_of() if one.fixed is None]
    return {
        "start": _table(one for one in public if one.who == "everyone"),
        "cluster": _table(one for one in public if _name_of(one) == "cluster"),
        **{name: _table(one for one in public if _name_of(one) == name) for name in TABLES},
        "fixed": "| key | why |\n|---|---|\n"
        + "".join(f"| `{one.path}` | {one.fixed} |\n" for one in settings_of() if one.fixed is not None),
    }


def _name_of(one: Setting) -> str:
    """The table that a setting is in: that of its nearest section."""
    section = one.path if one.is_section or "." not in one.path else one.path.rpartition(".")[0]
    return next((name for name, sections in TABLES.items() if section in sections), "cluster")


def _table(rows: Iterable[Setting]) -> str:
    return _HEAD + "".join(_row(one) for one in rows)


def _row(one: Setting) -> str:
    unit = one.unit.replace("|", "\\|")
    flag = one.flag or (one.variable or "")
    cells = (f"`{one.path}`", one.default, unit, one.who, f"`{flag}`" if flag else "", one.sentence)
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
