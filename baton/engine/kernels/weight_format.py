"""The formats in which the engine holds a weight matrix in fewer bits. Torch-free.

    W[n, k] = (code[n, k] - zero[n, k]) · scale[n // scale rows, k // scale columns]

    codes   bytes                      zero
    fp8     e4m3 [N, K]                0
    int8    [N, K]                     0
    int4    [N, ceil(K / 128), 64]     8, or one of each group [N, groups]

The bytes of int4: 128 columns are 64 bytes; byte j has column j in its low four bits and column j + 64 in its
high ones. Columns beyond K have the code 8, the scale of the last group, and are multiplied by zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Codes = Literal["fp8", "int8", "int4"]

# Columns of int4 codes that are stored together.
INT4_SPAN = 128
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of few bits. `scale_rows`, `scale_columns`: the rows and columns of W that share a scale; 0
    columns: all of them. `zeros`: whether each group has a zero of its own; int4 alone."""

    codes: Codes
    scale_rows: int = 1
    scale_columns: int = 0
    zeros: bool = False

    @property
    def name(self) -> str:
        """The format's name in keys of tables, logs and `baton status`: fp8, fp8-128x128, int8, int4-g128,
        int4-g128-zeros."""
        if self.scale_rows > 1:
            return f"{self.codes}-{self.scale_rows}x{self.scale_columns}"
        group = f"-g{self.scale_columns}" if self.scale_columns else ""
        return f"{self.codes}{group}{'-zeros' if self.zeros else ''}"

    def code_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the codes of W [rows, columns]."""
        if self.codes == "int4":
            return rows, math.ceil(columns / INT4_SPAN), INT4_SPAN // 2
        return rows, columns

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of W [rows, columns]; with one scale a row and group, also of the zeros."""
        groups = math.ceil(columns / self.scale_columns) if self.scale_columns else 1
        return math.ceil(rows / self.scale_rows), groups

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of codes, scales and zeros."""
        scales = math.prod(self.scale_shape(rows, columns))
        codes = math.prod(self.code_shape(rows, columns))
        return codes + scales * (SCALE_BYTES + (1 if self.zeros else 0))

    def by_row(self) -> WeightFormat:
        """The format with a scale of its own for each row, for matrices whose rows are not whole blocks."""
        return replace(self, scale_rows=1)


# What `--quantization` makes of a checkpoint that is not quantised.
FORMATS: dict[str, WeightFormat] = {
    "fp8": WeightFormat("fp8"),
    "int8": WeightFormat("int8"),
    "int4": WeightFormat("int4", scale_columns=128),
}
