"""A request's journal entry: opened at admission, closed at its end, written in the background."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.state import JournalRecord
from baton.v1.journal_pb2 import AcceptedRequest

if TYPE_CHECKING:
    from baton.state import Journal, Receipt
    from services.router.request.request import Request

# Requests have no tenants yet.
_TENANT = ""


class JournalEntry:
    """No method waits or fails. Without a journal they do nothing."""

    def __init__(self, journal: Journal | None, request: Request) -> None:
        """Opens the entry, which expires with the request's deadline."""
        self._journal = journal
        self._id = request.id
        self.receipt: Receipt | None = None
        if journal is not None:
            left_s = request.deadline - asyncio.get_running_loop().time()
            self.receipt = journal.append(record_of(request), left_s)

    def attempt(self, number: int) -> None:
        """Records that an attempt after the first one begins."""
        if self._journal is not None and number > 1:
            self._journal.mark_attempt(self._id, number)

    def close(self) -> None:
        """Closes the entry: the request has ended."""
        if self._journal is not None:
            self._journal.close(self._id)


def record_of(request: Request) -> JournalRecord:
    """What another router would need to continue the request. The prompt's text is not included."""
    details = AcceptedRequest(
        sampling=request.sampling,
        limits=request.limits,
        stop=request.stop,
        skip_special_tokens=request.skip_special_tokens,
        echo=request.echo is not None,
        choice=request.choice,
    )
    return JournalRecord(request.id, _TENANT, request.prompt_ids, details=details.SerializeToString())
