"""What a user is told in one line."""

from __future__ import annotations


class LoadgenError(Exception):
    """There is nothing to measure: a wrong flag, an unreadable file, a server that does not answer."""
