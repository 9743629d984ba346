"""Formats counts, bytes and durations for people: short, in a suitable unit."""

from __future__ import annotations


def short_count(count: float) -> str:
    """The count in at most five characters: 999, 12.3k, 4.5M."""
    if isinstance(count, float) and 0 < count < 9.95:
        return f"{count:.1f}"
    for divisor, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        scaled = count / divisor
        if scaled < 999.5:
            return f"{scaled:.0f}{unit}" if scaled >= 99.95 or not unit else f"{scaled:.1f}{unit}"
    return f"{count / 1e12:.0f}T"


def bytes_text(count: int) -> str:
    """The byte count in a suitable unit; 1 KiB = 1024 bytes."""
    if count < 1024:
        return f"{count} B"
    size, units = count / 1024, iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.1f} {unit}"


def duration(seconds: float) -> str:
    """The duration in at most two units: 42s, 3m 12s, 5h 03m, 2d 07h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"
