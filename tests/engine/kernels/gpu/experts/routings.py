"""Rows and their experts, as tests of the kernels choose them."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def routings(rows: int, top_k: int, experts: int) -> dict[str, Tensor]:
    """Experts of each row; of the last rows none."""
    row, place = torch.arange(rows)[:, None], torch.arange(top_k)[None, :]
    generator = torch.Generator().manual_seed(rows)
    shuffled = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    return {
        "all to the same": (experts - 1 - place).repeat(rows, 1),
        "each to others": (row * top_k + place) % experts,
        "some with none": torch.where(row % 3 == 1, -1, shuffled),
        "shuffled": shuffled,
    }


def no_rows(experts: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.int64, device=DEVICE)


def counts_of(ids: Tensor, experts: int, run: int) -> Tensor:
    """Entries of each expert among each `run` rows."""
    runs = [torch.bincount(part[part >= 0].cpu(), minlength=experts) for part in torch.split(ids, run)]
    return torch.stack(runs).to(DEVICE, torch.int32)


def as_ids(routing: Tensor) -> Tensor:
    return routing.to(DEVICE, torch.int32)
