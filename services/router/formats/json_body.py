"""JSON as request bodies may have it."""

from __future__ import annotations

import json

from baton.errors import FieldError


def parse_json(body: bytes | bytearray) -> object:
    """The document; FieldError where the body is not JSON."""
    try:
        document: object = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"the body is not valid JSON: {type(error).__name__}") from None
    return document


def _no_constant(name: str) -> float:
    """NaN and Infinity are not JSON; Python's parser accepts them."""
    raise ValueError(name)
