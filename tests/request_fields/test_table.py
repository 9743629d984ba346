"""The table of request fields agrees with the wire, with bodies, and with the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.engine.sequence import MAX_LOGIT_BIAS, SamplingParams
from baton.engine.shared_memory.logprob_records import MAX_LOGPROBS
from baton.engine.shared_memory.mailbox import ENTRY, MAX_STOP_IDS
from baton.request_fields.field import Bounds, Endpoint, Kind, RequestField, Treatment, float32
from baton.request_fields.table import BY_NAME, FIELDS, MOST_ITEMS, SAMPLING, SAMPLING_NUMBERS
from baton.v1.router_pb2 import GenerateRequest
from baton.v1.types_pb2 import Sampling
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.openai.fields import TYPES, Body
from services.router.formats.openai.tokenize_bodies import TokenizeBody
from services.router.formats.responses.body import ResponsesBody
from tools.request_types import TYPES as GENERATED
from tools.request_types import types

_TYPES = {
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
}
# Fields of GenerateRequest that are messages of their own.
_MESSAGES = {"text": 2, "token_ids": 3, "chat": 4, "grammar": 23}
_BODIES: dict[Endpoint, type[Body]] = {
    Endpoint.COMPLETIONS: CompletionBody,
    Endpoint.CHAT: ChatBody,
    Endpoint.RESPONSES: ResponsesBody,
    Endpoint.TOKENIZE: TokenizeBody,
}
# Fields whose type one endpoint declares otherwise.
_OTHERWISE = {(Endpoint.TOKENIZE, "model"), (Endpoint.RESPONSES, "tools")}


def _fields(message: Descriptor) -> dict[str, tuple[int, str]]:
    """Name → number and type of a message's fields."""
    return {field.name: (field.number, _type(field)) for field in message.fields}


def _type(field: FieldDescriptor) -> str:
    name = _TYPES[field.type] if field.message_type is None else field.message_type.name
    if field.is_repeated:
        return f"repeated {name}"
    return f"optional {name}" if field.has_presence else name


def test_generate_request_has_the_names_numbers_and_types_of_the_table() -> None:
    table = {row.name: (row.wire.request, row.wire.type) for row in FIELDS if row.wire is not None}
    found = _fields(GenerateRequest.DESCRIPTOR)
    assert {name: number for name, (number, _) in found.items() if name in _MESSAGES} == _MESSAGES
    assert {name: field for name, field in found.items() if name not in _MESSAGES} == table


def test_sampling_has_the_names_numbers_and_types_of_the_table() -> None:
    def bare(kind: str) -> str:
        return kind.removeprefix("optional ")

    table = {row.name: (row.wire.sampling, bare(row.wire.type)) for row in SAMPLING if row.wire is not None}
    found = _fields(Sampling.DESCRIPTOR)
    assert {name: (number, bare(kind)) for name, (number, kind) in found.items()} == table


def test_a_sampling_parameter_that_is_unset_is_off() -> None:
    """Protobuf's value of an unset field is the one that changes nothing, unless the field may be unset.
    top_p is always set."""
    for row in SAMPLING_NUMBERS:
        if not Sampling.DESCRIPTOR.fields_by_name[row.name].has_presence and row.name != "top_p":
            assert row.unused == 0, row.name


def test_generated_types_are_up_to_date() -> None:
    assert GENERATED.read_text("utf-8") == types(), "run make stubs"


@pytest.mark.parametrize("endpoint", _BODIES)
def test_bodies_declare_the_types_of_the_table(endpoint: Endpoint) -> None:
    for name, field in _BODIES[endpoint].model_fields.items():
        kind = BY_NAME[name].kind
        if kind in TYPES and (endpoint, name) not in _OTHERWISE:
            wanted = TYPES[kind] if field.is_required() else TYPES[kind] | None
            declared = field.rebuild_annotation() if field.is_required() else field.annotation
            assert declared == wanted, name


def test_every_sampling_number_has_a_word_of_the_mailbox() -> None:
    kinds = {Kind.FLOAT: "f", Kind.INTEGER: "i"}
    assert {row.name: kinds[row.kind] for row in SAMPLING_NUMBERS} == {
        row.name: ENTRY[row.name].kind for row in SAMPLING_NUMBERS
    }


def test_the_engine_has_room_for_the_most_items_of_the_table() -> None:
    assert MOST_ITEMS["logit_bias"] == MAX_LOGIT_BIAS
    assert MOST_ITEMS["stop_token_ids"] == MAX_STOP_IDS
    for name in ("logprobs", "top_logprobs"):
        bounds = BY_NAME[name].bounds
        assert bounds is not None
        assert bounds.most == MAX_LOGPROBS


def test_sampling_parameters_change_nothing_by_default() -> None:
    params = SamplingParams()
    assert not params.penalizes
    assert not params.filters
    for row in SAMPLING_NUMBERS:
        if row.stage is not None:
            changes: dict[str, Any] = {"temperature": 1.0, row.name: (row.unused or 0) + 0.5}
            changed = SamplingParams(**changes)
            assert (changed.penalizes, changed.filters).count(True) == 1, row.name
    assert [field.name for field in dataclasses.fields(params)] == [row.name for row in SAMPLING]


def test_rows_are_whole() -> None:
    assert len(BY_NAME) == len(FIELDS)
    for row in FIELDS:
        is_used = bool(row.used) or row.wire is not None
        assert is_used == bool(row.meaning), row.name
        assert row.meaning.endswith("." if is_used else ""), row.name
        if row.bounds is not None and row.default is not None:
            assert row.bounds.least <= row.default <= row.bounds.most, row.name


def test_what_only_one_endpoint_uses_the_others_refuse() -> None:
    row = RequestField("odd", "Baton", used=Endpoint.CHAT | Endpoint.TOKENIZE)
    treatments = [row.treatment_at(one) for one in Endpoint.GENERATING | Endpoint.TOKENIZE]
    assert treatments == [Treatment.REFUSED, Treatment.USED, Treatment.REFUSED, Treatment.USED]
    assert row.treatment_at(Endpoint.DETOKENIZE) is None
    assert RequestField("odd", "Baton", used=Endpoint.TOKENIZE).treatment_at(Endpoint.CHAT) is None


def test_bounds_hold_for_the_float32_of_each_end() -> None:
    bounds = Bounds(0, float("inf"), above=True, used=(1e-6, 1e6))
    assert bounds.has_float32(float32(1e-6))
    assert not bounds.has_float32(float32(0.99e-6))
    assert bounds.has_float32(float32(1e6))
    assert not bounds.has_float32(float("nan"))
    assert not Bounds(0, float("inf")).has_float32(float("inf"))
