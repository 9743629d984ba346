"""Counts, bytes and spans of time as people read them: short, in the unit that suits them."""

from __future__ import annotations


def short_count(count: float) -> str:
    """At most five characters: 999, 12.3k, 4.5M."""
    if isinstance(count, float) and 0 < count < 9.95:
        return f"{count:.1f}"
    for divisor, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        scaled = count / divisor
        if scaled < 999.5:
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 or not unit else f"{scaled:.1f}{unit}"
    return f"{count / 1e12:.0f}T"


def bytes_text(count: int) -> str:
    """A byte count in the unit that suits it, 1 KiB = 1024 bytes."""
    if count < 1024:
        return f"{count} B"
    size, units = count / 1024, iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"


def duration(seconds: float) -> str:
    """In the two units that suit it: 42s, 3m 12s, 5h 03m, 2d 07h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"
