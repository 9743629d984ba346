"""Converts the engine's logprobs to messages."""

from __future__ import annotations

from baton.engine.shared_memory.logprob_records import Logprobs
from baton.v1 import types_pb2


def logprobs_message(logprobs: Logprobs) -> types_pb2.Logprobs:
    """The message for the logprobs of one token."""
    top = [types_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return types_pb2.Logprobs(logprob=logprobs.logprob, top=top)
