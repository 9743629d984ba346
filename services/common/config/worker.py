"""Configuration of a worker."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.common.config.engine import EngineConfig
from services.common.config.state import StateConfig
from services.common.config.strict_model import StrictModel
from services.common.config.transfer import TransferConfig
from services.common.config.types import DRAIN_S, ClusterSecret, LogLevel, Role


class WorkerConfig(StrictModel):
    """One worker: a gRPC front process and one engine process."""

    # It names a folder of the disk cache, and begins with a letter or digit so that it is no path such as
    # "..".
    name: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")
    role: Role
    model: str
    cluster_id: str = ""
    """The cluster within which its name is unique."""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0: any free port, reported when ready."""
    metrics_port: int | None = Field(0, ge=0, le=65535)
    """0: any free port; null: no metrics."""
    served_model_name: str | None = None
    """The model's name in the API; a router uses only workers with its own name; unset: the folder's name."""
    restarts: int = Field(0, ge=0)
    """How often its supervisor has restarted this worker."""
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    state: StateConfig | None = None
    """Unset: the worker is not registered."""
    prefix_secret: str = Field("", repr=False)
    """Keys the hashes of cached blocks; unset: random."""
    cluster_secret: str = ClusterSecret
    drain_s: float = Field(DRAIN_S, ge=0)
    """Longest drain at a stop."""
    log_level: LogLevel = "info"

    @property
    def served_name(self) -> str:
        """The name of the model in the API."""
        return self.served_model_name or Path(self.model).name

    def on_gpu(self, index: int | None, workers: int) -> WorkerConfig:
        """The worker placed on a GPU of its host, which `workers` share unless the configuration states
        a number."""
        engine = self.engine
        placed = {"device_index": index, "gpu_workers": engine.gpu_workers or workers}
        return self.model_copy(update={"engine": engine.model_copy(update=placed)})
