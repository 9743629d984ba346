"""Turns messages into deltas, and deltas into a result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import grpc

from baton.base.errors import BatonError, ErrorKind
from baton.client.types import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Trace,
    Usage,
)
from baton.rpc.grpc_errors import from_status
from baton.v1 import types_pb2
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse, RequestTrace, Stage

_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}
# A newer server's further ones are left out.
_STAGES = {number: name.removeprefix("STAGE_").lower() for name, number in Stage.items()}


class Reader:
    """Turns one call's messages into deltas, and checks at the end that every output is complete."""

    def __init__(self, request: GenerateRequest) -> None:
        # The tokens of the prompt's logprobs, where it was given as ids; else their ids are unknown.
        self._prompt_ids = tuple(request.token_ids.ids)
        self._complete = False
        self.tokens_sent = False

    def read(self, response: GenerateResponse) -> Delta:
        """Converts a response message into the next delta of its output."""
        self.tokens_sent |= bool(response.token_ids)
        usage = None
        if response.HasField("usage"):
            self._complete = True
            usage = Usage(
                response.usage.prompt_tokens,
                response.usage.completion_tokens,
                response.usage.cached_tokens,
                response.usage.accepted_prediction_tokens,
                response.usage.rejected_prediction_tokens,
            )
        return Delta(
            index=response.index,
            tokens=tuple(response.token_ids),
            text=response.text,
            logprobs=_logprobs(response.token_ids, response.logprobs),
            prompt_logprobs=_logprobs(self._prompt_ids[1:], response.prompt_logprobs),
            tool_calls=tuple(
                ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in response.tool_calls
            ),
            reasoning=response.reasoning_content,
            request_id=response.request_id.hex(),
            first_number=response.first_number,
            resumable=response.resumable,
            finish_reason=_REASONS.get(response.finish_reason),
            trace=_trace(response.trace) if response.HasField("trace") else None,
            usage=usage,
        )

    def check_end(self) -> None:
        """Checks the end of the stream. Raises BatonError(UNAVAILABLE) if an output is incomplete."""
        if not self._complete:
            message = "the stream ended before the output did"
            raise BatonError(ErrorKind.UNAVAILABLE, message, tokens_sent=self.tokens_sent)

    def error(self, error: grpc.RpcError) -> BatonError:
        """The BatonError of a failed call."""
        meant = to_error(error)
        meant.tokens_sent |= self.tokens_sent
        return meant


def to_error(error: grpc.RpcError) -> BatonError:
    """The BatonError for a failed call's status and details, of sync and asyncio calls."""
    call = cast("grpc.Call", error)
    metadata = cast("Iterable[tuple[str, str | bytes]]", call.trailing_metadata() or ())
    return from_status(call.code(), call.details(), metadata)


def to_completion(deltas: Sequence[Delta]) -> Completion:
    """Combines all deltas of a finished call."""
    parts: dict[int, list[Delta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    usage = deltas[-1].usage
    assert usage is not None, "the reader judged the end"
    return Completion(tuple(_choice(index, parts[index]) for index in sorted(parts)), usage)


def _choice(index: int, deltas: Sequence[Delta]) -> Choice:
    reason = deltas[-1].finish_reason
    if reason is None:
        raise BatonError(ErrorKind.INTERNAL, f"output {index} ended without a reason", tokens_sent=True)
    return Choice(
        index=index,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        text="".join(delta.text for delta in deltas),
        finish_reason=reason,
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        prompt_logprobs=tuple(one for delta in deltas for one in delta.prompt_logprobs),
        tool_calls=_calls(part for delta in deltas for part in delta.tool_calls),
        reasoning="".join(delta.reasoning for delta in deltas),
        request_id=deltas[-1].request_id,
        trace=deltas[-1].trace,
    )


def _calls(parts: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Puts the calls of an output together."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        known = calls.get(part.index, ToolCall(part.id, part.name, ""))
        calls[part.index] = replace(known, arguments=known.arguments + part.arguments)
    return tuple(calls[index] for index in sorted(calls))


def _trace(trace: RequestTrace) -> Trace:
    stages = {_STAGES[one.stage]: one.offset_ns / 1e9 for one in trace.stages if one.stage in _STAGES}
    return Trace(
        trace.prefill_worker,
        trace.decode_worker,
        trace.attempts,
        trace.kv_bytes_shipped,
        trace.seed,
        stages,
        trace.handoff_exposed_ns / 1e9,
        trace.drafts.steps,
        trace.drafts.drafts,
        trace.drafts.accepted,
    )


def _logprobs(ids: Sequence[int], logprobs: Iterable[types_pb2.Logprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            ids[place] if place < len(ids) else None,
            one.logprob,
            tuple(TokenLogprob(other.token_id, other.logprob) for other in one.top),
        )
        for place, one in enumerate(logprobs)
    )
