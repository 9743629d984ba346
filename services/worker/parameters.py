"""The wire's sampling and limits as the engine's, checked: a worker trusts no peer's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.engine.mailbox import MAX_STOP_IDS
from baton.engine.sequence import Limits, SamplingParams
from baton.errors import BatonError, ErrorKind
from baton.v1 import types_pb2

_MAX_TOP_K = 1 << 30


def sampling_of(message: types_pb2.Sampling) -> SamplingParams:
    """Raises BatonError(INVALID)."""
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise BatonError(ErrorKind.INVALID, "temperature is a finite number ≥ 0")
    if not 0 < message.top_p <= 1:
        raise BatonError(ErrorKind.INVALID, "top_p lies in (0, 1]")
    if message.top_k > _MAX_TOP_K:
        raise BatonError(ErrorKind.INVALID, f"top_k exceeds {_MAX_TOP_K}")
    return SamplingParams(message.temperature, message.top_k, message.top_p, message.seed)


def limits_of(message: types_pb2.Limits, vocab_size: int) -> Limits:
    """Raises BatonError(INVALID)."""
    if message.max_tokens < 1:
        raise BatonError(ErrorKind.INVALID, "max_tokens is at least 1")
    if len(message.stop_token_ids) > MAX_STOP_IDS:
        raise BatonError(ErrorKind.INVALID, f"at most {MAX_STOP_IDS} stop ids, those of the model included")
    if any(token >= vocab_size for token in message.stop_token_ids):
        raise BatonError(ErrorKind.INVALID, f"a stop id is outside the vocabulary of {vocab_size}")
    return Limits(message.max_tokens, tuple(message.stop_token_ids))


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises BatonError(INVALID) unless there is a token and all lie in the vocabulary."""
    if not token_ids:
        raise BatonError(ErrorKind.INVALID, "the prompt is empty")
    if max(token_ids) >= vocab_size:
        raise BatonError(ErrorKind.INVALID, f"a token id is outside the vocabulary of {vocab_size}")
