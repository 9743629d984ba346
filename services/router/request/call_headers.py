"""Headers of an HTTP request, or metadata of a gRPC call, that say how it is to be treated.

`x-request-timeout-ms` is how long the client waits, as gRPC's own deadline. `idempotency-key` is refused: a
request that is sent twice runs twice, which ignoring the key would hide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from baton.base.errors import BatonError, ErrorKind, FieldError

TIMEOUT_HEADER = "x-request-timeout-ms"
_IDEMPOTENCY_HEADER = "idempotency-key"
# About a day.
_LONGEST_MS = 1e8


def check_idempotency(headers: Mapping[str, str]) -> None:
    """Raises FieldError where the client asks that a repeated request be run once."""
    if _IDEMPOTENCY_HEADER in headers:
        message = f"{_IDEMPOTENCY_HEADER} is not supported: a request that is sent twice runs twice"
        raise FieldError(message, param=_IDEMPOTENCY_HEADER, code="unsupported_parameter")


def timeout_of_headers(headers: Mapping[str, str]) -> float | None:
    """Seconds that the client waits; None where it does not say. Raises FieldError where the value is not a
    number of milliseconds."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LONGEST_MS:
        message = f"{TIMEOUT_HEADER} must be from 0 to {_LONGEST_MS:g} milliseconds"
        raise FieldError(message, param=TIMEOUT_HEADER)
    return value / 1e3


def check_not_past(left_s: float) -> None:
    """Raises BatonError(DEADLINE) where a call has no time left."""
    if left_s <= 0:
        raise BatonError(ErrorKind.DEADLINE, "the request's deadline has passed already")
