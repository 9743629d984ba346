"""Errors that a user sees in one line."""

from __future__ import annotations


class LoadgenError(Exception):
    """A measurement cannot be made: a wrong flag, an unreadable file, a server that does not answer."""


def reason_of(error: Exception) -> str:
    """Says why a file could not be read or parsed."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"has no {error}" if isinstance(error, KeyError) else str(error)
