"""State of one attempt at a `FakeWorker` that decodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1.decode_pb2 import TicketState
from baton.v1.types_pb2 import Attempt, FinishReason, Sampling


@dataclass
class Ticketed:
    """One attempt at its decode worker, from Reserve to its end."""

    attempt: Attempt
    router_id: bytes
    token_count: int
    state: TicketState.ValueType = TicketState.TICKET_STATE_RESERVED
    ids: list[int] = field(default_factory=list)
    prompt_length: int = 0
    max_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    # Its whole output, where that is not the model's.
    script: tuple[int, ...] = ()
    # Every message has its counts of drafts.
    always_counted: bool = False
    # Number of the first token that the router has not been sent.
    watermark: int = 0
    ending: FinishReason.ValueType = FinishReason.FINISH_REASON_UNSPECIFIED
    ending_sent: bool = False

    @property
    def emitted(self) -> list[int]:
        """The output so far, earlier attempts' tokens included."""
        return self.ids[self.prompt_length :]

    @property
    def live(self) -> bool:
        """True if the ticket holds a slot."""
        return self.state != TicketState.TICKET_STATE_ENDED
