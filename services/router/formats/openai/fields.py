"""The common part of the bodies of requests.

`field_table` says which fields there are and what becomes of each. A body declares those that its own code
reads; `with_fields_of` adds the others that are used, from the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError, create_model

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.request_fields.field import Endpoint, Kind, Treatment
from baton.request_fields.table import FIELDS, VALUES
from baton.v1.types_pb2 import Grammar
from services.router.formats.field_table import FieldTable
from services.router.formats.grammar_fields import grammar_of
from services.router.formats.ignored_fields import unknown_keys
from services.router.formats.json_bodies import parse_json
from services.router.request.request import ClientCall
from services.router.request.sizes import check_document


class FailFast(pydantic.FailFast):
    """Ends the validation of a list at its first invalid item: an error for each could take seconds.

    For lists whose items are not counted before. Hashable, since pydantic compares the annotations of a
    union's members.
    """

    __hash__ = object.__hash__


Stop = str | list[str]


def _integer(value: object) -> object:
    """A number without a fraction as an integer: JSON has one kind of numbers, and clients write 10.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(values: list[Any]) -> list[Any]:
    """A list in which numbers without a fraction are integers."""
    return [_integer(value) for value in values] if float in set(map(type, values)) else values


Integer = Annotated[int, BeforeValidator(_integer)]
# Types of the fields that bodies have from the table.
TYPES: Mapping[Kind, Any] = {
    Kind.FLOAT: float,
    Kind.INTEGER: Integer,
    Kind.FLAG: bool,
    Kind.TEXT: str,
    Kind.TEXTS: Annotated[list[str], FailFast()],
    Kind.STOP: Stop,
    Kind.TOKEN_IDS: list[Integer],
    Kind.BIASES: dict[str, float],
    Kind.OBJECT: dict[str, Any],
}
_VALUES = frozenset(field.name for field in VALUES)
# Kept, since each look-up of an enum's member takes as long as the rest of a field's treatment.
_USED = Treatment.USED


class Body(BaseModel):
    """Strict validation, without type conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # The fields of the API, used or not.
    table: ClassVar[FieldTable] = {}
    # Objects within the body, whose undocumented fields are ignored too.
    nested: ClassVar[Mapping[str, type[BaseModel]]] = {}
    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """The undocumented fields that the body had."""
        return self._ignored

    @classmethod
    def read(cls, data: bytes | bytearray, context: int) -> Self:
        """Parses and validates the bytes of a body. `context`: tokens that a request may have at most.

        Raises FieldError, which names the first invalid field, and never contains a value: that may be part
        of a prompt.
        """
        document = parse_json(data)
        check_document(document, context)
        return cls.parse(document)

    def packed(self) -> bytes:
        """Encodes a valid body for another process, with the names of its undocumented fields."""
        return json.dumps([vars(self), self._ignored], default=vars).encode()

    @classmethod
    def unpacked(cls, data: bytes | bytearray) -> Self:
        """Decodes a body that was packed."""
        fields, ignored = json.loads(data)
        body = cls.model_validate(fields)
        body._ignored = tuple(ignored)
        return body

    @classmethod
    def parse(cls, document: object) -> Self:
        """Validates a JSON document whose sizes are checked. Raises FieldError."""
        if not isinstance(document, dict):
            raise FieldError("the body must be a JSON object")
        used, ignored = {}, []
        for name, value in document.items():
            field = cls.table.get(name)
            if field is None:
                ignored.append(name)
            elif field.treatment is _USED:
                used[name] = value
            elif field.refuses(value):
                raise FieldError(f"{name} is not supported yet", param=name, code="unsupported_parameter")
        try:
            body = cls.model_validate(used)
        except ValidationError as error:
            raise _field_error(error) from None
        body._ignored = (*ignored, *unknown_keys(used, cls.nested))
        return body


BodyT = TypeVar("BodyT", bound=Body)


def with_fields_of(endpoint: Endpoint) -> Callable[[type[BodyT]], type[BodyT]]:
    """Class decorator: adds the fields of the table that the endpoint uses and the body does not declare."""

    def with_fields(body: type[BodyT]) -> type[BodyT]:
        others: dict[str, Any] = {
            field.name: (TYPES[field.kind] | None, None)
            for field in FIELDS
            if field.treatment_at(endpoint) is Treatment.USED and field.name not in body.model_fields
        }
        return create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **others
        )

    return with_fields


class Part(BaseModel):
    """An object within a body. Its undocumented fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class StreamOptions(Part):
    """Options for what a stream carries besides its tokens."""

    # Random padding that hides the length of tokens: accepted, without effect.
    include_obfuscation: bool | None = None
    # A last chunk with the usage, and the usage so far in every chunk.
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """The fields of every endpoint that generates that code reads by name."""

    nested: ClassVar[Mapping[str, type[BaseModel]]] = {"stream_options": StreamOptions}

    model: str
    logit_bias: dict[str, float] | None = None
    stop: Stop | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: dict[str, Any] | None = None

    def common(self) -> dict[str, Any]:
        """Arguments of `ParsedRequest`; the caller adds the prompt and the fields of its API."""
        grammar, asking = self.grammar()
        return {
            "model": self.model,
            "logit_bias": tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "ignore_eos": self.ignore_eos is True,
            "call": ClientCall(ignored_fields=self.ignored),
            "grammar": grammar,
            "api_names": {"grammar": asking},
            **{name: value for name, value in vars(self).items() if value is not None and name in _VALUES},
        }

    def grammar(self) -> tuple[Grammar | None, str]:
        """Returns the grammar that the output must match, if any, and the field that states it."""
        return grammar_of(None, self.structured_outputs, {})


class SamplingBody(GenerationBody):
    """The further fields of both kinds of completion that code reads by name."""

    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None

    def grammar(self) -> tuple[Grammar | None, str]:
        """Returns the grammar that the output must match, if any, and the field that states it."""
        older = ("json", "regex", "choice", "grammar", "whitespace_pattern")
        guided = {name: getattr(self, f"guided_{name}") for name in older}
        return grammar_of(self.response_format, self.structured_outputs, guided)


def are_token_ids(items: Iterable[object]) -> bool:
    """True if JSON values are all integers. A few times faster than to ask each: prompts have thousands."""
    return set(map(type, items)) <= {int}


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise FieldError("logit_bias: a key must be a token id", param="logit_bias")
    return int(key)


# What pydantic says of these has the names of our classes, or of Python's.
_NO_OBJECT, _OBJECT = ("model_type", "dict_type"), "Input should be an object"


def _field_error(error: ValidationError) -> BatonError:
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    # The error with the deepest location is of the branch of a union that was probably meant.
    first = max(errors, key=lambda one: len(one["loc"]))
    # The location also has the branches of a union, which pydantic names after their types.
    steps = [step for step in first["loc"] if not (isinstance(step, str) and _is_branch(step))]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:65]
    param = str(steps[0])[:64] if steps else None
    message = _OBJECT if first["type"] in _NO_OBJECT else first["msg"]
    if param is None:
        return BatonError(ErrorKind.INVALID, message)
    return FieldError(f"{path}: {message}", param=param)


def _is_branch(step: str) -> bool:
    return step in ("str", "int", "float", "bool", "none") or step.endswith("]")
