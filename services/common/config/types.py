"""Common parts of several configurations: the base of every model, how a setting is declared, types."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, get_args

# Plugins would be looked for in the metadata of every installed package, at each start of a process.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, ConfigDict, Field, model_validator


class StrictModel(BaseModel):
    """Frozen; an unknown key is an error. Validation errors never repeat the rejected value."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _false_is_off(cls, values: object) -> object:
        """Reads false as `off` where that is one of a setting's words: programs that write YAML 1.1, such as
        Helm, take the word without quotes for false."""
        if not isinstance(values, dict):
            return values
        words = {name for name, field in cls.model_fields.items() if "off" in get_args(field.annotation)}
        return {key: "off" if value is False and key in words else value for key, value in values.items()}


# Who should touch a setting: everyone who starts Baton; operators, who run it for others; experts, who have
# measured their workload with another value.
Audience = Literal["everyone", "operators", "experts"]


def setting(
    default: Any,  # noqa: ANN401
    sentence: str,
    *,
    who: Audience = "operators",
    unit: str = "",
    flag: bool | str = False,
    secret: bool = False,
    **bounds: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Declares a public setting; `...` as its default: it is required.

    `sentence`: what it does, for who has read nothing else. `unit`: of a number whose
    name does not end with it. `flag`: whether it has a flag and a variable, named like the field, or by this
    text. `bounds`: as of `pydantic.Field`.
    """
    about: dict[str, Any] = {"who": who, "unit": unit, "flag": flag}
    return Field(default, description=sentence, repr=not secret, json_schema_extra=about, **bounds)


def fixed(default: Any, why: str, **bounds: Any) -> Any:  # noqa: ANN401
    """Declares a value that is no public setting: Baton itself sets it, or no other value is better. A file
    that has it is refused with `why`, which completes "KEY is not a setting: "."""
    return Field(default, json_schema_extra={"fixed": why}, **bounds)


Role = Literal["prefill", "decode", "both"]
Port = Annotated[int, Field(ge=0, le=65535)]  # 0: any free port
# How a model writes tool calls and marks reasoning; auto: as its chat template shows.
ToolCallFormat = Literal["auto", "none", "hermes", "llama3", "mistral", "mistral_v11", "qwen3_coder"]
ReasoningFormat = Literal["auto", "none", "think"]
LogLevel = Literal["debug", "info", "warning", "error"]

DRAIN_S = 20.0  # longest time for running requests to end at a stop

ClusterSecret = Field("", repr=False)
"""Authenticates a process's internal RPCs and links. Shared by the cluster's processes; empty only where all
of them listen on loopback."""
