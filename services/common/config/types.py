"""Types and fields that several configurations share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

Role = Literal["prefill", "decode", "both"]
Device = Literal["auto", "cpu", "cuda"]
DTYPE_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _dtype_name(value: object) -> object:
    return DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


DType = Annotated[Literal["auto", "bfloat16", "float16", "float32", "float64"], BeforeValidator(_dtype_name)]
Numerics = Literal["auto", "exact", "fast"]
Transport = Literal["auto", "grpc", "ipc", "nccl"]
KVWire = Literal["native", "fp8", "int8"]
Weights = Literal["file", "random"]
LogLevel = Literal["debug", "info", "warning", "error"]

DRAIN_S = 20.0  # how long running requests may take to end at a stop


ClusterSecret = Field("", repr=False)
"""Authenticates a process's internal RPCs and links. Shared by the cluster's processes; empty only where all
of them listen on loopback."""
