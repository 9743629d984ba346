"""One sequence's output, and how it is put into messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.shared_memory.output_ring import Finish
from baton.engine.shared_memory.slot_progress import Progress
from baton.v1 import types_pb2
from baton.v1.decode_pb2 import SubscribeResponse
from baton.v1.types_pb2 import Attempt, DraftCounts, Failure, FinishReason
from services.decode.slot_span import SlotSpan

# Bytes on the wire of a token without logprobs, and of an output without tokens.
_TOKEN_BYTES, _OUTPUT_BYTES = 6, 64
# Bytes of memory of a token, of its logprobs beside their content, and of an output without tokens.
_TOKEN_MEMORY, _LOGPROBS_MEMORY, _OUTPUT_MEMORY = 40, 48, 2048
_NO_STEPS = Progress()


@dataclass(slots=True, eq=False)
class OutputStream:
    """The output of one sequence."""

    attempt: Attempt
    router_id: bytes
    slot: int
    generation: int
    first_number: int
    token_ids: list[int] = field(default_factory=list)
    # Where asked for, one for each token; serialised, which takes a fifth of the memory.
    logprobs: list[bytes] = field(default_factory=list)
    finish: Finish = Finish.NONE
    # When it ended, and when all of it had been sent, on the clock of `OutputStreams`.
    ended_at: float | None = None
    sent_at: float = 0.0
    # The watermark: how many of token_ids the router has been sent, and whether the finish reason.
    sent: int = 0
    sent_finish: bool = False
    # Why this worker gave the sequence up by itself.
    failure: Failure | None = None
    # None where its request is not traced.
    span: SlotSpan | None = None
    # Every message has what its steps did, and not the last one alone.
    always_counted: bool = False
    progress: Progress = _NO_STEPS

    @property
    def drafts(self) -> DraftCounts:
        """Counts of the sequence's steps and drafts, as the wire has them."""
        made = self.progress
        return DraftCounts(
            steps=made.steps,
            drafts=made.drafts,
            accepted=made.accepted,
            drafts_predicted=made.drafts_predicted,
            accepted_predicted=made.accepted_predicted,
        )

    @property
    def has_unsent(self) -> bool:
        """True if there is output beyond the watermark."""
        return self.sent < len(self.token_ids) or (self.finish is not Finish.NONE and not self.sent_finish)

    @property
    def memory_bytes(self) -> int:
        """The memory that it takes, approximately."""
        logprobs = sum(map(len, self.logprobs)) + _LOGPROBS_MEMORY * len(self.logprobs)
        return _OUTPUT_MEMORY + _TOKEN_MEMORY * len(self.token_ids) + logprobs


def add_output(message: SubscribeResponse, stream: OutputStream, room: int) -> int:
    """Adds the stream's unsent output to a message, about `room` bytes of it, at least one token; returns the
    bytes added."""
    until, taken = len(stream.token_ids), _OUTPUT_BYTES
    if stream.logprobs:
        for at in range(stream.sent, until):
            if taken >= room and at > stream.sent:
                until = at
                break
            taken += _TOKEN_BYTES + len(stream.logprobs[at])
    else:
        until = min(until, stream.sent + max(1, (room - taken) // _TOKEN_BYTES))
        taken += (until - stream.sent) * _TOKEN_BYTES
    output = message.outputs.add(
        attempt=stream.attempt,
        first_number=stream.first_number + stream.sent,
        token_ids=stream.token_ids[stream.sent : until],
        logprobs=map(types_pb2.Logprobs.FromString, stream.logprobs[stream.sent : until]),
    )
    stream.sent = until
    if until == len(stream.token_ids) and stream.finish is not Finish.NONE:
        output.finish_reason = FinishReason.ValueType(stream.finish.value)
        if stream.failure is not None and stream.finish is Finish.CANCELLED:
            output.failure.CopyFrom(stream.failure)
        stream.sent_finish = True
    if stream.progress.steps and (stream.always_counted or stream.sent_finish):
        output.drafts.CopyFrom(stream.drafts)
    return taken
