"""Configuration of the links between workers."""

from __future__ import annotations

from pydantic import Field, model_validator

from services.common.config.strict_model import StrictModel
from services.common.config.types import KVWire, Transport


class TransferConfig(StrictModel):
    """Links between workers."""

    transport: Transport = Field(
        "auto",
        description="ipc: within one host, nccl: between GPUs, grpc: anywhere; auto: ipc where both ends "
        "can, else grpc",
    )
    kv_wire: KVWire = Field(
        "native",
        description="how KV travels: as it is kept, or in eight bits an element with a scale for each token "
        "and head, which halves 16-bit KV and loses some precision; in eight bits it goes through the host",
    )
    piece_bytes: int = Field(1024 * 1024, ge=4096, le=1024 * 1024)
    window_pieces: int = Field(32, ge=2, le=65536, description="staging pieces a link has on its receiver")
    peer_timeout_s: float = Field(10.0, gt=0, description="the longest wait on a peer's answer")
    transfer_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where a decode worker listens for links over grpc or nccl; 0: any free port. Of several "
        "that `baton up` starts the first has it, each further one the next port",
    )
    frames_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="where it listens for the frames of nccl's links; 0: any free port. Of several as above",
    )

    def of_worker(self, index: int) -> TransferConfig:
        """That of the `index`-th of several workers: its ports are that much higher."""
        ports = {"transfer_port": self.transfer_port, "frames_port": self.frames_port}
        return self.model_copy(update={name: port and port + index for name, port in ports.items()})

    @property
    def through_host(self) -> bool:
        """Whether blocks always travel through the host, where they lie on GPUs too."""
        return self.transport == "grpc" or self.kv_wire != "native"

    @model_validator(mode="after")
    def _eight_bits_go_through_the_host(self) -> TransferConfig:
        if self.kv_wire != "native" and self.transport == "nccl":
            raise ValueError(f"kv_wire {self.kv_wire} goes through the host, transport nccl does not")
        return self
