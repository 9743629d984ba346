"""Reads files that hold one secret each. Errors name the file and never show its content."""

from __future__ import annotations

from pathlib import Path

from baton.base.cluster_auth import MIN_SECRET_LENGTH
from baton.base.errors import BatonError, ErrorKind

_JOURNAL_KEY_DIGITS = 64


def read_secret_file(path: Path, name: str) -> str:
    """The content of a file, without surrounding white space. `name`: the setting that names it. Raises
    `BatonError(INVALID)`."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _invalid(f"cannot read {name} {path}: {reason}") from None
    if not secret:
        raise _invalid(f"{name} {path} is empty")
    return secret


def read_shared_secret(path: Path, name: str) -> str:
    """A secret that a cluster's processes share. Raises `BatonError(INVALID)` where it is too short, too."""
    secret = read_secret_file(path, name)
    if len(secret) < MIN_SECRET_LENGTH:
        raise _invalid(f"{name} {path} holds fewer than {MIN_SECRET_LENGTH} characters")
    return secret


def read_journal_key(path: Path) -> str:
    """The journal's key, 64 hex digits. Raises `BatonError(INVALID)`."""
    key = read_secret_file(path, "journal_key_file")
    if len(key) != _JOURNAL_KEY_DIGITS or not set(key.lower()) <= set("0123456789abcdef"):
        raise _invalid(f"journal_key_file {path} does not hold {_JOURNAL_KEY_DIGITS} hex digits")
    return key


def _invalid(message: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, message)
