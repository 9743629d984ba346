"""The text of an output: detokenised, cut at stop strings, without the stop token."""

from __future__ import annotations

from services.router.request.request import Request
from services.router.text.detokenizer import Detokenizer
from services.router.text.stop_strings import StopStrings


class OutputText:
    """Turns an output's tokens, taken one by one, into text.

    Stop strings count from `min_tokens` on: the text of earlier tokens is not part of a match.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self._stop_ids = frozenset(request.stop_token_ids)
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.stop)
        self._unstopped = request.min_tokens
        # Characters of final text, including those held back for a stop string.
        self.length = 0

    @property
    def stopped(self) -> bool:
        """True if the last token completed a stop string."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """The text that is final with this token. A stop token has none."""
        if token_id in self._stop_ids:
            return ""
        text = self._detokenizer.push(token_id)
        self.length += len(text)
        if self._unstopped > 0:
            self._unstopped -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """The rest: text that was held back for a character or a stop string that was not completed."""
        if self.stopped:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
