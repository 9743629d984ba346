"""Numbers of a peer that a worker refuses, and those it takes over."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.engine.sequence import MAX_LOGIT_BIAS, Limits, SamplingParams
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.v1 import types_pb2
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import LogitBias, TokenLogprob
from services.worker.engine.common.request_parameters import (
    first_logprobs_of,
    limits_of,
    max_draft_tokens_of,
    prediction_of,
    sampling_of,
)

VOCAB = 1000


def bias(count: int, value: float = 1.0) -> list[LogitBias]:
    return [LogitBias(token_id=token, bias=value) for token in range(count)]


def test_all_sampling_parameters_are_converted() -> None:
    message = types_pb2.Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        seed=2**64 - 1,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias=[LogitBias(token_id=999, bias=-100), LogitBias(token_id=0, bias=100)],
        logprobs=0,
        top_n_sigma=1.5,
    )
    assert sampling_of(message, VOCAB, 20) == SamplingParams(
        0.5, 3, 0.75, 2**64 - 1, 0.25, 1.5, -2.0, 2.0, ((999, -100.0), (0, 100.0)), 0, 1.5
    )
    limits = types_pb2.Limits(max_tokens=5, stop_token_ids=[7, 8], min_tokens=5)
    assert limits_of(limits, VOCAB) == Limits(5, (7, 8), 5)
    assert limits_of(types_pb2.Limits(), VOCAB, least_tokens=0) == Limits(0)


def test_a_prediction_and_the_most_drafts_are_converted() -> None:
    assert list(prediction_of([5, 999, 0], VOCAB)) == [5, 999, 0]
    assert list(prediction_of([], VOCAB)) == []
    assert len(prediction_of([1] * 16_384, VOCAB)) == 16_384
    assert max_draft_tokens_of(ReserveRequest()) is None
    assert [max_draft_tokens_of(ReserveRequest(max_draft_tokens=most)) for most in (0, 7)] == [0, 7]


@pytest.mark.parametrize("ids", [[1] * 16_385, [VOCAB]], ids=["too many", "outside the vocabulary"])
def test_a_prediction_out_of_range_is_refused(ids: list[int]) -> None:
    with pytest.raises(BatonError) as caught:
        prediction_of(ids, VOCAB)
    assert caught.value.kind is ErrorKind.INVALID


def test_more_drafts_than_a_step_has_are_refused() -> None:
    with pytest.raises(BatonError, match="max_draft_tokens is a number from 0 to 7"):
        max_draft_tokens_of(ReserveRequest(max_draft_tokens=8))


def test_unset_is_off() -> None:
    params = sampling_of(types_pb2.Sampling(top_p=1), VOCAB, 20)
    assert params == SamplingParams()
    assert not params.penalizes
    assert params.logprobs is None
    assert len(sampling_of(types_pb2.Sampling(top_p=1, logit_bias=bias(300)), VOCAB, 20).logit_bias) == 300


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"top_n_sigma": -0.5}, "top_n_sigma"),
        ({"top_n_sigma": math.inf}, "top_n_sigma"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty"),
        ({"logit_bias": bias(MAX_LOGIT_BIAS + 1)}, "logit_bias"),
        ({"logit_bias": bias(1) + bias(1)}, "logit_bias"),
        ({"logit_bias": [LogitBias(token_id=VOCAB)]}, "logit_bias"),
        ({"logit_bias": bias(1, 100.5)}, "logit_bias"),
        ({"logit_bias": bias(1, math.nan)}, "logit_bias"),
    ],
    ids=lambda value: str(value).replace("\n", " ")[:40],
)
def test_invalid_sampling_is_refused_with_its_name(fields: dict[str, Any], names: str) -> None:
    message = types_pb2.Sampling(top_p=1)
    for name, value in fields.items():
        if name == "logit_bias":
            message.logit_bias.extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(BatonError, match=names) as refused:
        sampling_of(message, VOCAB, 20)
    assert refused.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(("wanted", "most", "why"), [(0, 0, "disabled"), (21, 20, "at most 20")])
def test_more_logprobs_than_a_worker_reports_are_for_another_worker(wanted: int, most: int, why: str) -> None:
    with pytest.raises(BatonError, match=f"logprobs are {why}") as refused:
        sampling_of(types_pb2.Sampling(top_p=1, logprobs=wanted), VOCAB, most)
    assert refused.value.kind is ErrorKind.CONFLICT


def first_reported(*token_ids: int) -> types_pb2.Logprobs:
    top = [TokenLogprob(token_id=token, logprob=-0.5 * rank) for rank, token in enumerate(token_ids)]
    return types_pb2.Logprobs(logprob=-3, top=top)


def test_a_commit_has_the_first_tokens_logprobs() -> None:
    asked = SamplingParams(logprobs=2)
    record = CommitRecord(first_logprobs=first_reported(999, 4))
    assert first_logprobs_of(record, asked, VOCAB) == Logprobs(-3.0, ((999, 0.0), (4, -0.5)))
    assert first_logprobs_of(CommitRecord(first_logprobs=first_reported()), asked, VOCAB) == Logprobs(-3.0)
    assert first_logprobs_of(CommitRecord(), SamplingParams(), VOCAB) is None


@pytest.mark.parametrize(
    ("reported", "asked"),
    [
        (None, 0),
        (first_reported(), None),
        (first_reported(1, 2, 3), 2),
        (first_reported(VOCAB), 2),
    ],
)
def test_a_commit_without_the_requested_logprobs_is_refused(
    reported: types_pb2.Logprobs | None, asked: int | None
) -> None:
    with pytest.raises(BatonError, match="logprob") as refused:
        first_logprobs_of(CommitRecord(first_logprobs=reported), SamplingParams(logprobs=asked), VOCAB)
    assert refused.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        (types_pb2.Limits(), "max_tokens"),
        (types_pb2.Limits(max_tokens=3, min_tokens=4), "min_tokens"),
        (types_pb2.Limits(max_tokens=3, stop_token_ids=range(9)), "stop"),
        (types_pb2.Limits(max_tokens=3, stop_token_ids=[VOCAB]), "stop"),
    ],
)
def test_invalid_limits_are_refused_with_their_names(limits: types_pb2.Limits, names: str) -> None:
    with pytest.raises(BatonError, match=names) as refused:
        limits_of(limits, VOCAB)
    assert refused.value.kind is ErrorKind.INVALID
