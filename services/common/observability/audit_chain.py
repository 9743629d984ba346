"""The lines of an audit log: JSON, each with the hash of the one before, and the check that none was changed.

A line that was changed, removed or inserted breaks the chain from there on. What the file cannot show is that
lines at its end are missing, or that all of it was rewritten: for that, compare the last hash with the one in
the process's log (`audit_log_opened`, `audit_log_closed`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind

FIRST_HASH = "0" * 64
# Bytes. Every field of a record is shorter than 512.
LONGEST_LINE = 4096


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One event. These fields are all that a line can have, and none of them has content of a request.

    `event`: request, response, refused, authentication, key, admin or opened. `target`: what an admin action
    is about, or the id of a stored response that was read or deleted.
    """

    event: str
    outcome: str
    key_id: str = ""
    tenant: str = ""
    request_id: str = ""
    model: str = ""
    route: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    target: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """The part of a line that the chain needs: its number, the hash of the one before, and its own."""

    number: int
    previous: str
    hash: str
    # Records that were lost between the line before and this one.
    dropped: int = 0


# What the first line of all follows.
START = Link(0, "", FIRST_HASH)


@dataclass(frozen=True, slots=True)
class Verified:
    """A chain without a break."""

    first_line: int
    last_line: int
    dropped: int
    hash: str


def line_of(last: Link, at: float, record: AuditRecord, dropped: int) -> tuple[bytes, Link]:
    """The line that follows `last`, without its end, and its link. Empty fields are left out. `at`:
    seconds since 1970."""
    fields: dict[str, object] = {
        "line": last.number + 1,
        "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
    }
    given = {name: getattr(record, name) for name in AuditRecord.__slots__}
    fields |= {name: value for name, value in given.items() if value not in ("", None)}
    if dropped:
        fields["dropped"] = dropped
    fields["previous"] = last.hash
    line = json.dumps(fields, separators=(",", ":")).encode()
    return line, Link(last.number + 1, last.hash, _hash_of(line), dropped)


def link_of(line: bytes) -> Link | None:
    """The link of a line without its end; None where it is not one of an audit log."""
    try:
        fields = json.loads(line)
        number, previous, dropped = fields["line"], fields["previous"], fields.get("dropped", 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not (isinstance(number, int) and isinstance(previous, str) and isinstance(dropped, int)):
        return None
    return Link(number, previous, _hash_of(line), dropped)


def verify(paths: Sequence[Path]) -> Verified:
    """Checks files that continue each other, oldest first; the first one may continue an older one.

    Raises BatonError(INVALID) with the file and the number of the first line that does not follow from the
    one before.
    """
    first: Link | None = None
    last, dropped = START, 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                for place, raw in enumerate(file, 1):
                    link = link_of(raw[:-1]) if raw.endswith(b"\n") else None
                    if link is None or not ((first is None and link.number > 1) or _follows(link, last)):
                        raise BatonError(ErrorKind.INVALID, f"{path}: line {place} breaks the chain")
                    first, last, dropped = first or link, link, dropped + link.dropped
        except OSError as error:
            raise BatonError(ErrorKind.INVALID, f"cannot read {path}: {error.strerror}") from None
    return Verified(first.number if first else 0, last.number, dropped, last.hash)


def _follows(link: Link, last: Link) -> bool:
    return link.number == last.number + 1 and link.previous == last.hash


def _hash_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
