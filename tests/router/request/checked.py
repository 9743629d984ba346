"""A request, the limits that it is checked by, and what an error says."""

from __future__ import annotations

from baton.base.errors import ErrorKind, FieldError
from services.router.request import validate
from services.router.request.request import ParsedRequest
from services.router.request.validate import RequestLimits

VOCAB, EOS = 300, (256, 257)
PARSED = ParsedRequest(model="fake", text="a")
LIMITS = RequestLimits("fake", EOS, VOCAB, 512)


def check(parsed: ParsedRequest) -> validate.Fields:
    """The fields of a request that `LIMITS` allow."""
    return validate.check_fields(parsed, LIMITS)


def parts_of(error: FieldError) -> tuple[str | None, str, str | None, ErrorKind]:
    """The field, message, code and kind of an error."""
    return error.param, error.message, error.code, error.kind
