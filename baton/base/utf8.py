"""Text as operating systems pass it: where it is not UTF-8, Python keeps its bytes as lone surrogates."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """False for text with lone surrogates, which no message between processes can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
