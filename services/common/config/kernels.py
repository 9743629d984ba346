"""The file of `baton warm-kernels`."""

from __future__ import annotations

from pydantic import Field

from services.common.config.types import Role, StrictModel
from services.common.config.worker import EngineConfig


class WarmedWorker(StrictModel):
    """A worker whose kernels are compiled: its shape and settings are those of workers that will use them."""

    model: str = Field(description="folder with a config.json; weights are not needed")
    role: Role
    engine: EngineConfig = EngineConfig()


class KernelsFile(StrictModel):
    """What is compiled, one worker after the other."""

    workers: tuple[WarmedWorker, ...] = Field(min_length=1)
    start_timeout_s: float = Field(1800.0, gt=0, description="longest time that one may take")
