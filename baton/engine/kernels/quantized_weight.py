"""A weight matrix in fewer bits on its device; `baton.engine.kernels.weight_format` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.kernels.weight_format import INT4_SPAN, WeightFormat

_CODE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
# Elements of a matrix that are computed in float32 at a time.
_ELEMENTS_AT_ONCE = 1 << 24
_ZERO = 8  # of int4 codes without zeros of their own


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """W [N, K]. `codes`: float8_e4m3fn or int8 [N, K], uint8 [N, ceil(K / 128), 64] of int4. `scales` float32
    [ceil(N / scale rows), ceil(K / scale columns)]; `zeros` uint8 [N, groups] or None."""

    format: WeightFormat
    columns: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @classmethod
    def empty(
        cls, weight_format: WeightFormat, rows: int, columns: int, device: torch.device | str
    ) -> QuantizedWeight:
        """Uninitialised memory for W [rows, columns]."""
        scales, zeros = weight_format.scale_shape(rows, columns), None
        if weight_format.zeros:
            zeros = torch.empty(scales, dtype=torch.uint8, device=device)
        codes = torch.empty(
            weight_format.code_shape(rows, columns), dtype=_CODE_DTYPES[weight_format.codes], device=device
        )
        return cls(
            weight_format, columns, codes, torch.empty(scales, dtype=torch.float32, device=device), zeros
        )

    def randomize_(self) -> None:
        """Fills in random codes, with scales by which products with rows of unit variance have about unit
        variance. For measurements."""
        codes = self.codes.view(torch.uint8)
        codes.random_(0, 256)
        if self.format.codes == "fp8":  # up to 1.875, of either sign: no NaN
            codes.bitwise_and_(0b10111111)
        spread = {"fp8": 0.4, "int8": 74.0, "int4": 4.6}[self.format.codes]
        self.scales.fill_(self.columns**-0.5 / spread)
        if self.zeros is not None:
            self.zeros.fill_(_ZERO)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of W: rows, columns."""
        return self.codes.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> list[Tensor]:
        """Codes, scales, and zeros where there are some."""
        return [self.codes, self.scales] if self.zeros is None else [self.codes, self.scales, self.zeros]

    def rows(self, first: int, count: int) -> QuantizedWeight:
        """A view of `count` rows. Raises ValueError where they are not whole blocks of scales."""
        return self.split([first, count, self.shape[0] - first - count])[1]

    def split(self, rows: Sequence[int]) -> list[QuantizedWeight]:
        """Returns one view for each count of `rows`, in order. Raises ValueError if a block of scales would
        be divided."""
        each = self.format.scale_rows
        if any(count % each for count in rows[:-1]):
            raise ValueError(f"rows {list(rows)} divide blocks of {each}")
        codes = torch.split(self.codes, list(rows))
        scales = torch.split(self.scales, [-(-count // each) for count in rows])
        zeros = [None] * len(rows) if self.zeros is None else torch.split(self.zeros, list(rows))
        return [
            replace(self, codes=code, scales=scale, zeros=zero)
            for code, scale, zero in zip(codes, scales, zeros, strict=True)
        ]

    def part(self, rows: Sequence[range], columns: range | None = None) -> QuantizedWeight:
        """A copy of runs of rows one behind another, and of each row the `columns`; None: all of them.
        Raises ValueError where a block of scales would be divided, and for columns of int4, whose codes lie
        in pairs."""
        high, wide = self.format.scale_rows, self.format.scale_columns
        for run in rows:
            _check_whole("rows", run, high, self.shape[0])
        scales = [range(run.start // high, -(-run.stop // high)) for run in rows]
        mine = replace(
            self,
            codes=_runs(self.codes.view(torch.uint8), rows).view(self.codes.dtype),
            scales=_runs(self.scales, scales),
            zeros=None if self.zeros is None else _runs(self.zeros, scales),
        )
        if columns is None:
            return mine
        if self.format.codes == "int4":
            raise ValueError(f"columns {columns.start} to {columns.stop} of int4 cannot be taken apart")
        _check_whole("columns", columns, wide or 1, self.columns)
        codes = mine.codes.view(torch.uint8)[:, columns.start : columns.stop].contiguous()
        groups = mine.scales[:, columns.start // wide : -(-columns.stop // wide)] if wide else mine.scales
        return replace(
            mine, columns=len(columns), codes=codes.view(mine.codes.dtype), scales=groups.contiguous()
        )

    def copy_(self, other: QuantizedWeight) -> None:
        """Takes the other's values, which has the same shape and format."""
        if (other.format, other.shape) != (self.format, self.shape):
            raise ValueError(f"{other.format.name} {other.shape} is not {self.format.name} {self.shape}")
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

    def with_row_scales(self) -> QuantizedWeight:
        """The same matrix with scales of its own for each row."""
        each, rows = self.format.scale_rows, self.codes.shape[0]
        if each == 1:
            return self
        scales = self.scales.repeat_interleave(each, 0)[:rows].contiguous()
        return replace(self, format=self.format.by_row(), scales=scales)

    def reordered(self, order: Tensor) -> QuantizedWeight:
        """The matrix whose row i is row order[i] of this one; with scales for each row."""
        mine = self.with_row_scales()
        zeros = None if mine.zeros is None else mine.zeros[order]
        # By bytes: indexing float8 is not implemented on every device.
        codes = mine.codes.view(torch.uint8)[order].view(mine.codes.dtype)
        return replace(mine, codes=codes, scales=mine.scales[order], zeros=zeros)

    def dequantized(self, dtype: torch.dtype, elements_at_once: int = _ELEMENTS_AT_ONCE) -> Tensor:
        """W [N, K]: computed in float32, `elements_at_once` or a row at a time, then rounded to the dtype."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        each = self.format.scale_rows
        rows = max(1, elements_at_once // (self.columns * each)) * each
        sizes = [min(rows, self.shape[0] - start) for start in range(0, self.shape[0], rows)]
        for place, part in zip(torch.split(out, sizes), self.split(sizes), strict=True):
            place.copy_(part._values())
        return out

    def _values(self) -> Tensor:
        """The whole matrix W in float32."""
        rows, columns = self.shape
        scales = self._of_elements(self.scales.repeat_interleave(self.format.scale_rows, 0)[:rows])
        if self.format.codes != "int4":
            return self.codes.to(torch.float32) * scales
        codes = torch.cat((self.codes & 15, self.codes >> 4), -1).view(rows, -1)[:, :columns]
        zeros = _ZERO if self.zeros is None else self._of_elements(self.zeros).to(torch.float32)
        return (codes.to(torch.float32) - zeros) * scales

    def _of_elements(self, groups: Tensor) -> Tensor:
        """[N, groups] → [N, K], or [N, 1] where there is one group."""
        if not self.format.scale_columns:
            return groups
        return groups.repeat_interleave(self.format.scale_columns, 1)[:, : self.columns]


def _runs(tensor: Tensor, rows: Sequence[range]) -> Tensor:
    return torch.cat([tensor[run.start : run.stop] for run in rows])


def _check_whole(kind: str, run: range, each: int, size: int) -> None:
    if run.start % each or (run.stop % each and run.stop != size):
        raise ValueError(f"{kind} {run.start} to {run.stop} divide blocks of {each}")


Weight = Tensor | QuantizedWeight
"""W [N, K], as it is or in fewer bits."""


def pack_int4(codes: Tensor) -> Tensor:
    """codes [N, K] uint8 of 0 to 15 → [N, ceil(K / 128), 64] uint8; see `weight_format`."""
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % INT4_SPAN), value=_ZERO)
    low, high = padded.view(rows, -1, 2, INT4_SPAN // 2).unbind(2)
    return low | (high << 4)


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """W as a tensor of the dtype."""
    return weight.dequantized(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)
