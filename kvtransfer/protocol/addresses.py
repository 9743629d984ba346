"""The schemes of a receiver's addresses."""

from __future__ import annotations

IPC_SCHEME = "ipc:"


NCCL_SCHEME = "nccl:"
