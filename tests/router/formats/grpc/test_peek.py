"""What is read of a message before it is parsed agrees with the message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.base.errors import FieldError
from baton.v1.router_pb2 import GenerateRequest, TokenIds
from baton.v1.types_pb2 import LogitBias
from services.router.formats.grpc.peek import check_counts, without_text
from services.router.request.sizes import check_message


def filled(**fields: object) -> GenerateRequest:
    """With fields of every wire type before the counted ones."""
    return GenerateRequest(model="m", text="a" * 300, temperature=0.5, top_k=200, seed=7, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "most", "one"), [("logit_bias", 300, LogitBias(bias=1)), ("stop", 16, "a")]
)
def test_counts(field: str, most: int, one: object) -> None:
    check_counts(filled(**{field: [one] * most}).SerializeToString())
    message = filled(**{field: [one] * (most + 1)})
    with pytest.raises(FieldError) as early:
        check_counts(message.SerializeToString())
    with pytest.raises(FieldError) as late:
        check_message(message, 1000)
    assert (early.value.message, early.value.param) == (late.value.message, late.value.param)


def test_stop_ids_that_are_not_packed() -> None:
    one = bytes((GenerateRequest.STOP_TOKEN_IDS_FIELD_NUMBER << 3, 5))
    check_counts(one * 8)
    with pytest.raises(FieldError, match="stop_token_ids"):
        check_counts(one * 9)


def test_a_message_that_begins_with_many_fields_is_left_to_the_parser() -> None:
    other = b"\xe8\x04\x01"
    check_counts(other * 2000 + filled(stop=["a"] * 17).SerializeToString())


def test_without_text() -> None:
    message = filled()
    size, rest = without_text(message.SerializeToString(), "m")
    message.ClearField("text")
    assert (size, GenerateRequest.FromString(rest)) == (300, message)
    nothing = 0, b""
    assert without_text(filled().SerializeToString(), "other") == nothing
    ids = GenerateRequest(model="m", token_ids=TokenIds(ids=[1] * 300))
    assert without_text(ids.SerializeToString(), "m") == nothing
    assert without_text(filled().SerializeToString()[:200], "m") == nothing


@given(st.binary(max_size=60))
def test_anything(data: bytes) -> None:
    check_counts(data)
    size, rest = without_text(data, "")
    assert 0 <= size <= len(data) - len(rest)
