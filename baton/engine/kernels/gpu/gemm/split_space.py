"""The memory through which programs that split a product's K exchange partial sums."""

from __future__ import annotations

import torch


class SplitSpace:
    """Memory for partial sums: `partial` float32, `arrived` int32 zeros, left as zeros. Products that follow
    one another on one stream may share it."""

    def __init__(self, elements: int, tiles: int, device: torch.device) -> None:
        self.partial = torch.empty(elements, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    def holds(self, elements: int, tiles: int) -> bool:
        """True if the space has at least `elements` partial sums and `tiles` counters."""
        return self.partial.numel() >= elements and self.arrived.numel() >= tiles
