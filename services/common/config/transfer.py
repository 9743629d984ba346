"""Configuration of the links between workers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from services.common.config.types import Port, StrictModel, fixed, setting

Transport = Literal["auto", "grpc", "ipc", "nccl"]
KVWire = Literal["native", "fp8", "int8"]


class TransferConfig(StrictModel):
    """Configuration of the links between workers."""

    transport: Transport = setting(
        "auto",
        "transport of KV blocks between workers: ipc (within one host), nccl (between GPUs), grpc "
        "(anywhere); auto: ipc where both ends are on one host, else grpc",
        flag=True,
    )
    kv_wire: KVWire = setting(
        "native",
        "format of KV blocks in transfer: native: unchanged; fp8 or int8: half the bytes of 16 bits, with "
        "a scale for each token and head, less precision, and through host memory",
        who="experts",
        flag=True,
    )
    piece_bytes: int = fixed(
        1024 * 1024,
        "it is 1 MiB, or a block where that is smaller: smaller pieces only make more messages",
        ge=4096,
        le=1024 * 1024,
    )
    window_pieces: int = fixed(
        32,
        "it is 32, together up to 32 MiB for each link: more than a network of 25 GB/s carries in 1 ms",
        ge=2,
        le=65536,
    )
    max_links: int = fixed(
        256,
        "it is 256 senders to a decode worker; through the host those beyond 64 have fewer staging pieces",
        ge=1,
        le=4096,
    )
    peer_timeout_s: float = fixed(10.0, "it is 10 s: with less a peer that is busy would count as dead")
    transfer_port: Port = setting(
        0,
        "port for links (grpc, nccl) of the first decode worker, each further one has the next; 0: any free "
        "port",
        flag=True,
    )
    frames_port: Port = setting(0, "second port for nccl links, as `transfer.transfer_port`", flag=True)
    both_receives: bool = setting(
        False,
        "workers of role `both` also decode what other workers prefill, and prefill what others decode, "
        "as the router chooses for each request: [conditional "
        "disaggregation](operations.md#conditional-disaggregation)",
        flag=True,
    )

    def of_worker(self, index: int) -> TransferConfig:
        """The configuration of the `index`-th of several workers, whose ports are higher by `index`."""
        ports = {"transfer_port": self.transfer_port, "frames_port": self.frames_port}
        return self.model_copy(update={name: port and port + index for name, port in ports.items()})

    @property
    def through_host(self) -> bool:
        """True if blocks are always sent through host memory, even where they are on GPUs."""
        return self.transport == "grpc" or self.kv_wire != "native"

    @model_validator(mode="after")
    def _quantized_is_sent_through_the_host(self) -> TransferConfig:
        if self.kv_wire != "native" and self.transport == "nccl":
            raise ValueError(f"kv_wire {self.kv_wire} is sent through the host, transport nccl is not")
        return self


def check_quantised_once(kv_dtype: str, transfer: TransferConfig) -> None:
    """Raises ValueError where both the cache and what is sent of it would be quantised."""
    if kv_dtype == "fp8" and transfer.kv_wire != "native":
        raise ValueError(
            f"kv_wire {transfer.kv_wire} is for a cache that kv_dtype fp8 does not quantise already"
        )
