"""Configuration of the links between workers."""

from __future__ import annotations

from pydantic import Field, model_validator

from services.common.config.strict_model import StrictModel
from services.common.config.types import KVWire, Transport


class TransferConfig(StrictModel):
    """Links between workers."""

    transport: Transport = "auto"
    """ipc: within one host, nccl: between GPUs, grpc: anywhere; auto: ipc where both workers can use it, else
    grpc."""
    kv_wire: KVWire = "native"
    """Wire quantization of KV: native: none, fp8 and int8: eight bits an element with a scale for each token
    and head, which halves the bytes of 16-bit KV and loses some precision; quantized KV is sent through
    host memory."""
    piece_bytes: int = Field(1024 * 1024, ge=4096, le=1024 * 1024)
    window_pieces: int = Field(32, ge=2, le=65536)
    """Staging pieces of a link at its receiver."""
    peer_timeout_s: float = Field(10.0, gt=0)
    """Longest wait for a peer's answer."""
    transfer_port: int = Field(0, ge=0, le=65535)
    """Where a decode worker listens for links over grpc or nccl; 0: any free port. The first worker of `baton
    up` gets this port, each further one the next."""
    frames_port: int = Field(0, ge=0, le=65535)
    """Where a decode worker listens for the frames of nccl links; 0: any free port; further workers as
    above."""

    def of_worker(self, index: int) -> TransferConfig:
        """The configuration of the `index`-th of several workers, whose ports are higher by `index`."""
        ports = {"transfer_port": self.transfer_port, "frames_port": self.frames_port}
        return self.model_copy(update={name: port and port + index for name, port in ports.items()})

    @property
    def through_host(self) -> bool:
        """Whether blocks are always sent through host memory, even where they are on GPUs."""
        return self.transport == "grpc" or self.kv_wire != "native"

    @model_validator(mode="after")
    def _quantized_is_sent_through_the_host(self) -> TransferConfig:
        if self.kv_wire != "native" and self.transport == "nccl":
            raise ValueError(f"kv_wire {self.kv_wire} is sent through the host, transport nccl is not")
        return self
