"""An output's text: detokenised, cut at stop strings, without the token that ended it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.router.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from services.router.request.request import Request
    from services.router.text.detokenizer import Detokenizer


class OutputText:
    """Takes a request's tokens one by one; `stopped` once a stop string was completed.

    A stop string counts from `min_tokens` on: what the tokens before say cannot be part of one.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self._stop_ids = frozenset(request.stop_token_ids)
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.stop)
        self._unstopped = request.min_tokens
        # Characters that are certain, whether or not a stop string still holds them back.
        self.length = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the output with the last token pushed."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """The text that became certain. A stop id has none: it ends the output, unseen."""
        if token_id in self._stop_ids:
            return ""
        text = self._detokenizer.push(token_id)
        self.length += len(text)
        if self._unstopped > 0:
            self._unstopped -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """The rest: what was held back for a character or a stop string that did not come."""
        if self.stopped:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
