"""Responses that are encoded without a message are those that protobuf would make."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from baton.v1.router_pb2 import RequestTrace, Usage
from baton.v1.types_pb2 import Sampling
from services.router.api.grpc_api import to_response
from services.router.formats.grpc.plain_response import PlainResponses
from services.router.request.request import Delta, Finish, Request
from services.router.tools.output_parser import OutputStructure

_NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))


def request(choice: int = 0) -> Request:
    return Request(
        id=b"r" * 16,
        prompt_ids=(1, 2),
        sampling=Sampling(),
        max_tokens=8,
        stop_token_ids=(),
        stop=(),
        skip_special_tokens=True,
        arrived_ns=0,
        deadline=1.0,
        choice=choice,
    )


@given(
    choice=_NUMBERS,
    first_number=_NUMBERS,
    ids=st.lists(_NUMBERS, max_size=5),
    text=st.text(max_size=300),
    resumable=st.booleans(),
)
def test_the_bytes_are_protobufs(
    choice: int, first_number: int, ids: list[int], text: str, resumable: bool
) -> None:
    one, delta = request(choice), Delta(first_number, ids, text, resumable=resumable)
    assert PlainResponses(one).encode(delta) == to_response(one, delta).SerializeToString()


def test_deltas_with_more_in_them_are_left_to_protobuf() -> None:
    with_logprobs = dataclasses.replace(request(), sampling=Sampling(logprobs=0))
    structured = dataclasses.replace(request(), structure=OutputStructure())
    for one in (with_logprobs, structured):
        assert PlainResponses(one).encode(Delta(1, [7], "a")) is None
    last = Delta(1, [7], "a", finish=Finish.STOP, usage=Usage(), trace=RequestTrace())
    for delta in (Delta(0, [7], "a", opening=True), last):
        assert PlainResponses(request()).encode(delta) is None
