"""Equal matrices one behind another in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.quantized_weight import Weight


@dataclass(frozen=True, slots=True, eq=False)
class WeightStack:
    """W [E, N, K], held as one weight [E · N, K]: those of the experts of a layer."""

    weight: Weight
    count: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of W: matrices, rows of each, columns."""
        rows, columns = self.weight.shape
        return self.count, rows // self.count, columns

    def matrix(self, number: int) -> Weight:
        """Matrix `number`, [N, K], in the same memory."""
        _, rows, _ = self.shape
        first = number * rows
        if isinstance(self.weight, Tensor):
            return self.weight[first : first + rows]
        return self.weight.rows(first, rows)
