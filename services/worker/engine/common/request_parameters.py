"""Validates and converts sampling parameters and limits from the wire; a worker trusts no peer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from baton.base.errors import BatonError, ErrorKind
from baton.engine.sequence import MAX_LOGIT_BIAS, Limits, SamplingParams
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.mailbox import MAX_STOP_IDS
from baton.request_fields.field import RequestField
from baton.request_fields.table import BY_NAME, MAX_PREDICTION_TOKENS, SAMPLING_NUMBERS
from baton.v1 import types_pb2
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.transfer_pb2 import CommitRecord

_BIAS, _DRAFTS = BY_NAME["logit_bias"], BY_NAME["max_draft_tokens"]
# Sampling parameters that may be unset, which changes nothing.
_OPTIONAL: frozenset[str] = frozenset(
    field.name for field in types_pb2.Sampling.DESCRIPTOR.fields if field.has_presence
)


def sampling_of(message: types_pb2.Sampling, vocab_size: int, max_logprobs: int) -> SamplingParams:
    """The engine's sampling parameters. Raises BatonError: INVALID where one is out of range,
    CONFLICT where this worker does not report as many logprobs."""
    numbers: dict[str, Any] = {field.name: _number_of(message, field) for field in SAMPLING_NUMBERS}
    return SamplingParams(
        seed=message.seed,
        logit_bias=_bias_of(message.logit_bias, vocab_size),
        logprobs=_logprobs_of(message, max_logprobs),
        **numbers,
    )


def limits_of(message: types_pb2.Limits, vocab_size: int, *, least_tokens: int = 1) -> Limits:
    """The engine's limits. Raises BatonError(INVALID) where one is out of range, `max_tokens` below
    `least_tokens` included."""
    _require(message.max_tokens >= least_tokens, f"max_tokens is at least {least_tokens}")
    _require(message.min_tokens <= message.max_tokens, "min_tokens is at most max_tokens")
    _require(
        len(message.stop_token_ids) <= MAX_STOP_IDS,
        f"at most {MAX_STOP_IDS} stop ids, those of the model included",
    )
    if any(token >= vocab_size for token in message.stop_token_ids):
        raise BatonError(ErrorKind.INVALID, f"a stop id is outside the vocabulary of {vocab_size}")
    return Limits(message.max_tokens, tuple(message.stop_token_ids), message.min_tokens)


def first_logprobs_of(record: CommitRecord, sampling: SamplingParams, vocab_size: int) -> Logprobs | None:
    """The first token's logprobs in a commit record. Raises BatonError(INVALID) where they are not those
    asked for."""
    first = record.first_logprobs
    _require(
        record.HasField("first_logprobs") == (sampling.logprobs is not None),
        "the first token has logprobs exactly where they are asked for",
    )
    _require(len(first.top) <= (sampling.logprobs or 0), "the first token has more logprobs than asked for")
    _require(
        all(one.token_id < vocab_size for one in first.top), "a logprob's token is out of the vocabulary"
    )
    if sampling.logprobs is None:
        return None
    return Logprobs(first.logprob, tuple((one.token_id, one.logprob) for one in first.top))


def prediction_of(token_ids: Sequence[int], vocab_size: int) -> array[int]:
    """The tokens of a prediction as int32. Raises BatonError(INVALID) where they are too many, or one is
    outside the vocabulary."""
    _require(
        len(token_ids) <= MAX_PREDICTION_TOKENS, f"a prediction has at most {MAX_PREDICTION_TOKENS} tokens"
    )
    if token_ids:
        check_token_ids(token_ids, vocab_size)
    return array("i", token_ids)


def max_draft_tokens_of(request: ReserveRequest) -> int | None:
    """The most drafts of a step; None where the request does not say. Raises BatonError(INVALID) where it is
    out of range."""
    if not request.HasField("max_draft_tokens"):
        return None
    _check_bounds(_DRAFTS, request.max_draft_tokens)
    return request.max_draft_tokens


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises BatonError(INVALID) for an empty prompt or a token id outside the vocabulary."""
    _require(bool(token_ids), "the prompt is empty")
    _require(max(token_ids) < vocab_size, f"a token id is outside the vocabulary of {vocab_size}")


def _number_of(message: types_pb2.Sampling, field: RequestField) -> float | None:
    name: Any = field.name
    if name in _OPTIONAL and not message.HasField(name):
        return field.unused
    value: float = getattr(message, name)
    _check_bounds(field, value)
    return value


def _check_bounds(field: RequestField, value: float) -> None:
    bounds = field.bounds
    if bounds is not None and not bounds.has_float32(value):
        least, most = bounds.used or (bounds.least, bounds.most)
        raise BatonError(ErrorKind.INVALID, f"{field.name} is a number from {least:g} to {most:g}")


def _bias_of(bias: Sequence[types_pb2.LogitBias], vocab_size: int) -> tuple[tuple[int, float], ...]:
    _require(len(bias) <= MAX_LOGIT_BIAS, f"logit_bias has at most {MAX_LOGIT_BIAS} tokens")
    _require(len({one.token_id for one in bias}) == len(bias), "logit_bias names a token twice")
    for one in bias:
        _require(one.token_id < vocab_size, f"logit_bias: {one.token_id} is outside the vocabulary")
        _check_bounds(_BIAS, one.bias)
    return tuple((one.token_id, one.bias) for one in bias)


def _logprobs_of(message: types_pb2.Sampling, max_logprobs: int) -> int | None:
    if not message.HasField("logprobs"):
        return None
    if message.logprobs > max_logprobs or not max_logprobs:
        limit = f"at most {max_logprobs}" if max_logprobs else "disabled"
        raise BatonError(ErrorKind.CONFLICT, f"logprobs are {limit} at this worker")
    return message.logprobs


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BatonError(ErrorKind.INVALID, message)
