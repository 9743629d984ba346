"""How large an answer may be, judged before any of it runs.

An answer's size is counted in numbers: a token is one, and with logprobs there are its own and those of the
likeliest others beside it. A prompt that is repeated before its output counts as well.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from baton.errors import FieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.router.request.request import Request


def check_answer(requests: Sequence[Request], most: int) -> None:
    """Raises FieldError where the requests' answer may have more than `most` numbers."""
    values = sum(_values(request) for request in requests)
    if values > most:
        raise FieldError(
            f"the answer may have {values} numbers (outputs x tokens x (1, or 2 + logprobs)); "
            f"max_answer_values allows {most}",
            param="max_tokens",
            code="answer_too_large",
        )


def shorten(requests: Sequence[Request], most: int) -> list[Request]:
    """The requests with as many tokens as the limit allows, where the client has set no limit itself."""
    left = [most // len(requests) // _values_a_token(request) - _prompt(request) for request in requests]
    return [
        dataclasses.replace(
            request, max_tokens=min(request.max_tokens, tokens), min_tokens=min(request.min_tokens, tokens)
        )
        if 0 < tokens < request.max_tokens
        else request
        for request, tokens in zip(requests, left, strict=True)
    ]


def _values(request: Request) -> int:
    return (request.max_tokens + _prompt(request)) * _values_a_token(request)


def _values_a_token(request: Request) -> int:
    return 2 + request.sampling.logprobs if request.wants_logprobs else 1


def _prompt(request: Request) -> int:
    return len(request.prompt_ids) if request.echo is not None else 0
