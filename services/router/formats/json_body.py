"""Strict JSON of request bodies."""

from __future__ import annotations

import json

from baton.errors import FieldError


def parse_json(body: bytes | bytearray) -> object:
    """Parses a body; FieldError if it is not JSON."""
    try:
        document: object = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"the body is not valid JSON: {type(error).__name__}") from None
    return document


def _no_constant(name: str) -> float:
    """Refuses NaN and Infinity, which are not JSON though Python's parser accepts them."""
    raise ValueError(name)
