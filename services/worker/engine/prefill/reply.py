"""The replies of one Prefill call to the front."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.base.errors import BatonError
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.v1.engine_pb2 import EngineEvent, PrefillEndedEvent
from baton.v1.prefill_pb2 import FirstToken, HandedOff, PrefillResponse, PromptLogprobs
from services.common.engine.channel import PROMPT_LOGPROBS_A_MESSAGE, failed_event
from services.common.engine.logprobs import logprobs_message


class PrefillReply:
    """The events of one call, in this order: prompt logprobs, first token, handed off; then its end or
    failure."""

    def __init__(self, emit: Callable[[EngineEvent], None], command_id: int) -> None:
        self._emit = emit
        self._command_id = command_id
        self._prompt_logprobs: list[Logprobs] = []  # not sent yet
        self._next_position = 1  # of the first of them; token 0 has no logprob

    def prompt_logprobs(self, logprobs: Sequence[Logprobs], *, last: bool) -> None:
        """Sends the prompt's logprobs in messages of bounded size; `last`: no more follow."""
        self._prompt_logprobs += logprobs
        while self._prompt_logprobs and (last or len(self._prompt_logprobs) >= PROMPT_LOGPROBS_A_MESSAGE):
            part = self._prompt_logprobs[:PROMPT_LOGPROBS_A_MESSAGE]
            del self._prompt_logprobs[: len(part)]
            messages = [logprobs_message(one) for one in part]
            message = PromptLogprobs(first_position=self._next_position, logprobs=messages)
            self._next_position += len(part)
            self._send(PrefillResponse(prompt_logprobs=message))

    def first_token(self, first: FirstToken) -> None:
        self._send(PrefillResponse(first_token=first))

    def handed_off(self, transport: str, bytes_shipped: int, exposed_ns: int) -> None:
        """Replies that the handoff has ended, `exposed_ns` after the prompt's last step."""
        handed_off = HandedOff(transport=transport, bytes_shipped=bytes_shipped, exposed_ns=exposed_ns)
        self._send(PrefillResponse(handed_off=handed_off))

    def ended(self, ended: PrefillEndedEvent) -> None:
        self._emit(EngineEvent(id=self._command_id, prefill_ended=ended))

    def failed(self, error: BatonError) -> None:
        self._emit(failed_event(error, self._command_id))

    def _send(self, response: PrefillResponse) -> None:
        self._emit(EngineEvent(id=self._command_id, prefill=response))
