"""Text that is held back because a marker may begin in it."""

from __future__ import annotations

BLANK = " \t\r\n"


def final_length(text: str, marker: str) -> int:
    """Characters of `text` that come before whatever may be the beginning of a marker, or white space before
    one."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text[:-length].rstrip(BLANK))
    return len(text.rstrip(BLANK))
