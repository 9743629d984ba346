"""The base of every configuration model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen; an unknown key is an error. Validation errors never repeat the rejected value."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
