"""Memory that products need beside their operands."""

from __future__ import annotations

import torch

from baton.engine.kernels.gpu.gemm.split_space import SplitSpace


class Scratch:
    """Memory that products of up to R rows need beside their operands, shared by all of a stream.

    `normed` [R, widest normed input], `branch` [R, widest output that is normed], and `sums`, what the
    library computes before an epilogue or scales, such as [R, gate and up]; all flat. `space` for split
    products. `codes` [R, widest input that becomes codes], bytes, flat, and their scales `code_scales` [R].
    """

    def __init__(
        self,
        rows: int,
        normed: int,
        sums: int,
        space: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        branch: int = 0,
        codes: int = 0,
    ) -> None:
        """`normed`, `branch`, `codes`: widths; `sums`: elements; `space`: elements and tiles for split
        products."""
        self.codes = torch.empty(rows * codes, device=device, dtype=torch.uint8)
        self.code_scales = torch.empty(rows if codes else 0, device=device, dtype=torch.float32)
        self.one = torch.ones((), device=device, dtype=torch.float32)
        self.normed = torch.empty(rows * normed, device=device, dtype=dtype)
        self.sums = torch.empty(sums, device=device, dtype=dtype)
        self.branch = torch.empty(rows * branch, device=device, dtype=dtype)
        self.space = SplitSpace(max(1, space[0]), max(1, space[1]), device)
