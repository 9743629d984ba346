"""The largest response, checked before any of it runs.

A response's size is counted in values: one for each token, and with logprobs also the token's own logprob and
those of the most likely tokens. An echoed prompt counts as well.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from baton.errors import FieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.router.request.request import Request


def check_response_size(requests: Sequence[Request], max_values: int) -> None:
    """Raises FieldError if the response to these requests may have more than `max_values` values."""
    values = sum(_values(request) for request in requests)
    if values > max_values:
        raise FieldError(
            f"the answer may have {values} numbers (outputs x tokens x (1, or 2 + logprobs)); "
            f"max_answer_values allows {max_values}",
            param="max_tokens",
            code="answer_too_large",
        )


def shorten(requests: Sequence[Request], max_values: int) -> list[Request]:
    """Lowers max_tokens, which the client did not set, to what the limit allows."""
    left = [
        max_values // len(requests) // _values_per_token(request) - _echoed(request) for request in requests
    ]
    return [
        dataclasses.replace(
            request, max_tokens=min(request.max_tokens, tokens), min_tokens=min(request.min_tokens, tokens)
        )
        if 0 < tokens < request.max_tokens
        else request
        for request, tokens in zip(requests, left, strict=True)
    ]


def _values(request: Request) -> int:
    return (request.max_tokens + _echoed(request)) * _values_per_token(request)


def _values_per_token(request: Request) -> int:
    return 2 + request.sampling.logprobs if request.wants_logprobs else 1


def _echoed(request: Request) -> int:
    return len(request.prompt_ids) if request.echo is not None else 0
