"""Collects one output for a response that is not streamed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from services.router.request.request import Delta

if TYPE_CHECKING:
    from baton.v1.router_pb2 import Usage
    from services.router.request.request import Finish


class WholeOutput:
    """Compact: ids and offsets take four bytes each, logprobs stay serialised."""

    def __init__(self) -> None:
        self._token_ids = array("I")
        self._offsets = array("I")
        self._logprobs: list[bytes] = []
        self._prompt_logprobs: list[bytes] = []
        self._texts: list[str] = []
        self._finish: Finish | None = None
        self._usage: Usage | None = None

    def append(self, delta: Delta) -> None:
        """Adds the next delta."""
        self._token_ids.extend(delta.token_ids)
        self._offsets.extend(delta.offsets)
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._texts.append(delta.text)
        self._finish, self._usage = delta.finish, delta.usage

    def delta(self) -> Delta:
        """The whole output as one delta, which shares this object's memory."""
        return Delta(
            first_number=0,
            token_ids=self._token_ids,
            text="".join(self._texts),
            logprobs=self._logprobs,
            offsets=self._offsets,
            prompt_logprobs=self._prompt_logprobs,
            opening=True,
            finish=self._finish,
            usage=self._usage,
        )
