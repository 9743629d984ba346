"""What several configurations share: the base of every model, types, fields."""

from __future__ import annotations

import os
from typing import Literal

# Plugins would be looked for in the metadata of every installed package, at each start of a process.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, ConfigDict, Field


class StrictModel(BaseModel):
    """Frozen; an unknown key is an error. Validation errors never repeat the rejected value."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


Role = Literal["prefill", "decode", "both"]
# How a model writes tool calls and marks reasoning; auto: as its chat template shows.
ToolCallFormat = Literal["auto", "none", "hermes", "llama3", "mistral", "mistral_v11", "qwen3_coder"]
ReasoningFormat = Literal["auto", "none", "think"]
LogLevel = Literal["debug", "info", "warning", "error"]

DRAIN_S = 20.0  # how long running requests may take to end at a stop

ClusterSecret = Field("", repr=False)
"""Authenticates a process's internal RPCs and links. Shared by the cluster's processes; empty only where all
of them listen on loopback."""
