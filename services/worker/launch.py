"""What a front tells its engine process on standard input. Torch-free."""

from __future__ import annotations

from services.common.config import StrictModel, WorkerConfig


class EngineLaunch(StrictModel):
    """Configuration, identity, and the two descriptors that the engine inherits."""

    worker: WorkerConfig
    incarnation: str  # 32 hex digits, shared by front and engine
    channel_fd: int
    memory_fd: int
