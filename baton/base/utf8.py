"""Text that cannot be encoded: Python keeps what operating systems pass and is not UTF-8 as lone surrogates,
and escapes in JSON may spell them."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """False for text with lone surrogates, which no message between processes can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
