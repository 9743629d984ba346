"""JSON objects that follow a described shape: in plain words, or as a JSON schema."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from models.demo_training.tasks.turn import Turn, below, pick
from models.demo_training.tasks.words import ADJECTIVES, FIELDS, NOUNS

TASK = "json"

_REQUESTS = (
    "Write a JSON object with these fields: {}.",
    "Give me JSON with {}.",
    "Answer with a JSON object that has {}.",
    "Make a JSON object of this shape: {}.",
    "Return a JSON object with {}.",
    "I need JSON: {}",
    "Create a JSON object with the fields {}.",
    "JSON with {}",
)
_KEY_REQUESTS = (
    "Return a JSON object with the keys {}.",
    "Write JSON with the keys {}",
    "Give me a JSON object with keys {}",
    "Make JSON with the fields {}.",
)
_SCHEMA_REQUESTS = ("Write JSON that fits this schema: {}", "Answer with JSON that follows this schema: {}")
_MAX_FIELDS, _MAX_INNER, _MAX_ITEMS, _MAX_CHOICES = 6, 3, 4, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape that a value must have. `kind`: any, string, integer, number, boolean, choice, list, object.

    `choices` of a choice; `item` and `count` of a list (None: any number); `fields` of an object.
    """

    kind: str
    choices: tuple[str, ...] = ()
    item: Shape | None = None
    count: int | None = None
    fields: tuple[tuple[str, Shape], ...] = ()

    @property
    def words(self) -> str:
        """The shape in plain English."""
        if self.kind == "choice":
            return "one of " + ", ".join(map(json.dumps, self.choices))
        if self.kind == "list":
            assert self.item is not None
            return f"list of {'' if self.count is None else f'{self.count} '}{self.item.words}s"
        if self.kind == "object":
            return f"object with {self.listed}"
        return self.kind

    @property
    def listed(self) -> str:
        return ", ".join(self.described)

    @property
    def described(self) -> list[str]:
        """Each field of an object, in plain English."""
        return [name if shape.kind == "any" else f"{name} ({shape.words})" for name, shape in self.fields]

    @property
    def schema(self) -> dict[str, Any]:
        """The shape as a JSON schema."""
        if self.kind == "choice":
            return {"enum": list(self.choices)}
        if self.kind == "list":
            assert self.item is not None
            bounds = {} if self.count is None else {"minItems": self.count, "maxItems": self.count}
            return {"type": "array", "items": self.item.schema, **bounds}
        if self.kind == "object":
            names = [name for name, _ in self.fields]
            properties = {name: shape.schema for name, shape in self.fields}
            return {"type": "object", "properties": properties, "required": names}
        return {} if self.kind == "any" else {"type": self.kind}

    def fits(self, value: object) -> bool:
        """True if a parsed value has this shape, with no field missing or added."""
        match self.kind:
            case "any":
                return True
            case "string":
                return isinstance(value, str)
            case "integer":
                return isinstance(value, int) and not isinstance(value, bool)
            case "number":
                return isinstance(value, int | float) and not isinstance(value, bool)
            case "boolean":
                return isinstance(value, bool)
            case "choice":
                return value in self.choices
            case "list":
                assert self.item is not None
                return (
                    isinstance(value, list)
                    and self.count in (None, len(value))
                    and all(map(self.item.fits, value))
                )
        return (
            isinstance(value, dict)
            and value.keys() == {name for name, _ in self.fields}
            and all(shape.fits(value[name]) for name, shape in self.fields)
        )

    def fits_text(self, text: str) -> bool:
        """True if the text is one JSON value of this shape and nothing else."""
        try:
            return self.fits(json.loads(text))
        except ValueError:
            return False


def shaped(draw: random.Random) -> Turn:
    """A shape, described, and an object that has it."""
    chance = draw.random()
    if chance < 0.15:
        names = draw.sample(FIELDS, 1 + below(draw, _MAX_FIELDS))
        shape = Shape("object", fields=tuple((name, Shape("any")) for name in names))
        question = pick(draw, _KEY_REQUESTS).format(_enumerated(draw, shape))
    else:
        shape = Shape("object", fields=_fields(draw, 1 + below(draw, _MAX_FIELDS), inner=True))
        if chance < 0.4:
            question = pick(draw, _SCHEMA_REQUESTS).format(json.dumps(shape.schema))
        else:
            question = pick(draw, _REQUESTS).format(_enumerated(draw, shape))
    return Turn(TASK, question, json.dumps(_value(draw, shape)), shape.fits_text)


def _enumerated(draw: random.Random, shape: Shape) -> str:
    """Lists the shape's fields, sometimes with "and" before the last."""
    *most, last = shape.described
    return f"{', '.join(most)} and {last}" if most and draw.random() < 0.4 else shape.listed


def _fields(draw: random.Random, count: int, *, inner: bool) -> tuple[tuple[str, Shape], ...]:
    names = draw.sample(FIELDS, count)
    return tuple(
        (f"{name}_{pick(draw, NOUNS)}" if draw.random() < 0.1 else name, _shape(draw, inner=inner))
        for name in names
    )


def _shape(draw: random.Random, *, inner: bool) -> Shape:
    chance = draw.random()
    if chance < 0.6 or not inner:
        return Shape(pick(draw, ("string", "integer", "number", "boolean")))
    if chance < 0.75:
        return Shape("choice", choices=tuple(draw.sample(ADJECTIVES, 2 + below(draw, _MAX_CHOICES - 1))))
    if chance < 0.9:
        item = Shape(pick(draw, ("string", "integer", "number", "boolean")))
        return Shape("list", item=item, count=1 + below(draw, _MAX_ITEMS) if draw.random() < 0.7 else None)
    return Shape("object", fields=_fields(draw, 1 + below(draw, _MAX_INNER), inner=False))


def _value(draw: random.Random, shape: Shape) -> object:
    match shape.kind:
        case "any":
            return pick(draw, (*NOUNS, *ADJECTIVES)) if draw.random() < 0.7 else below(draw, 100)
        case "string":
            return (
                f"{pick(draw, ADJECTIVES)} {pick(draw, NOUNS)}" if draw.random() < 0.5 else pick(draw, NOUNS)
            )
        case "integer":
            return below(draw, 10 ** (1 + below(draw, 3)))
        case "number":
            return below(draw, 1000) / 10
        case "boolean":
            return draw.random() < 0.5
        case "choice":
            return pick(draw, shape.choices)
        case "list":
            assert shape.item is not None
            count = 1 + below(draw, _MAX_ITEMS) if shape.count is None else shape.count
            return [_value(draw, shape.item) for _ in range(count)]
    return {name: _value(draw, inner) for name, inner in shape.fields}
