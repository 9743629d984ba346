"""The field `prediction` of both kinds of completion: text that the output is expected to contain."""

from __future__ import annotations

from typing import Any, Literal

from baton.base.errors import FieldError
from services.router.formats.openai.fields import Part

_FIELD = "prediction"


class PredictionBody(Part):
    """Text that an output is expected to contain."""

    type: Literal["content"]
    # A string or a list of text parts; `text_of` checks it, for a better error message than pydantic's.
    content: Any


def text_of(prediction: PredictionBody | None) -> str | None:
    """The predicted text, that of several parts joined; None without a prediction. Raises FieldError where
    there is a part that is no text."""
    if prediction is None:
        return None
    content = prediction.content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return "".join(map(_part, parts))


def without_text(prediction: PredictionBody | None) -> PredictionBody | None:
    """A prediction of no text; None without one."""
    return None if prediction is None else PredictionBody(type="content", content="")


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise FieldError(f"{_FIELD}.content must be a string or a list of text parts", param=_FIELD)
    return text
