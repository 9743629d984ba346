"""The error that a user sees in one line."""

from __future__ import annotations


class LoadgenError(Exception):
    """Nothing can be measured: a wrong flag, an unreadable file, a server that does not answer."""
