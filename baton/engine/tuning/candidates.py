"""Lists the kernels that are tried for a product: those that were the fastest anywhere when a wide choice of
tiles was measured on an H100 and an H200, over four shapes of three families.

Up to 64 rows a product is bound by the bytes of W, and kernels that stream W once win; above that the
vendor's library nearly always does, except `wide_product` at 256 rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.engine.forward.layers.linear import has_gemv
from baton.engine.forward.products.code_products import has_digits, has_row_codes, has_w8a8
from baton.engine.gemm_dispatch.choice import (
    Choice,
    DigitsTuning,
    Library,
    RowCodesTuning,
    W8A8Library,
    W8A8Tuning,
)
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
from baton.engine.kernels.gpu.gemm.quantized_linear import fits
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
from baton.engine.kernels.gpu.gemm.streamed_product import StreamedTuning, streamed_fits
from baton.engine.kernels.gpu.gemm.wide_product import EPILOGUES as WIDE_EPILOGUES
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, runs_here
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.model.layers.linear import Product

# Rows that are measured. Other batch sizes take the entry of the next of these. The library chooses by the
# rows: what is best at 32 need not be good at 24.
BUCKETS = (1, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_GEMV = (
    (8, 512, 4, 3), (4, 1024, 4, 1), (8, 512, 4, 1), (4, 512, 4, 4), (4, 512, 4, 1), (4, 2048, 4, 1),
    (16, 256, 4, 4), (4, 1024, 4, 3), (8, 1024, 4, 1), (16, 512, 4, 3), (4, 2048, 8, 1), (2, 4096, 8, 1),
)  # fmt: skip
# rows of x: (columns, width, splits, stages, warps)
_SKINNY = {
    16: (
        (64, 128, 2, 5, 4), (64, 128, 1, 5, 4), (128, 128, 1, 3, 4), (128, 64, 4, 5, 8), (64, 128, 1, 4, 4),
        (128, 64, 1, 5, 8), (64, 128, 4, 4, 4), (64, 256, 1, 3, 4), (64, 128, 2, 4, 4),
    ),
    32: (
        (64, 128, 2, 5, 4), (64, 128, 1, 4, 4), (64, 128, 1, 5, 4), (128, 128, 1, 3, 4), (128, 64, 1, 5, 8),
        (64, 128, 4, 4, 4),
    ),
    48: (
        (64, 128, 1, 4, 4), (64, 128, 1, 5, 4), (128, 64, 1, 5, 8), (128, 128, 1, 3, 4), (64, 128, 2, 4, 4),
        (64, 128, 2, 5, 4), (128, 64, 1, 4, 8),
    ),
    64: (
        (64, 128, 1, 4, 4), (128, 64, 1, 5, 8), (128, 128, 1, 3, 4), (64, 64, 1, 6, 4), (64, 128, 2, 4, 4),
    ),
    96: ((128, 64, 1, 4, 8), (128, 64, 1, 5, 8), (64, 128, 1, 5, 4), (64, 128, 2, 4, 4), (64, 64, 2, 8, 4)),
    128: ((128, 64, 1, 4, 8), (64, 64, 2, 6, 4), (64, 64, 1, 6, 4), (64, 128, 1, 3, 4)),
}  # fmt: skip
# The same for quantised weights.
_QUANTIZED_GEMV = (
    (16, 512, 4, 3), (8, 512, 4, 3), (8, 512, 4, 1), (16, 256, 4, 4), (8, 1024, 4, 3), (8, 1024, 4, 1),
    (4, 512, 4, 4), (4, 1024, 4, 1), (4, 2048, 4, 3), (8, 2048, 4, 1), (2, 2048, 4, 1),
)  # fmt: skip
_INT4_GEMV = (
    (8, 2048, 4, 1), (4, 4096, 4, 1), (4, 2048, 4, 1), (8, 1024, 2, 1), (16, 2048, 4, 1), (4, 4096, 8, 1),
    (8, 4096, 8, 1), (16, 1024, 2, 1), (2, 4096, 4, 1), (4, 1024, 2, 1),
)  # fmt: skip
_QUANTIZED = {
    16: ((32, 256, 2, 4, 4), (64, 128, 4, 4, 4), (64, 256, 4, 3, 4), (64, 128, 2, 4, 4), (32, 128, 1, 5, 4)),
    32: ((64, 128, 1, 4, 4), (64, 128, 2, 4, 4), (64, 128, 4, 4, 4), (64, 256, 1, 3, 4)),
    64: ((64, 128, 1, 4, 4), (64, 128, 2, 4, 4)),
    128: ((64, 128, 1, 4, 4), (64, 128, 2, 3, 4)),
}  # fmt: skip
_W8A8 = {
    16: ((64, 128, 1, 6, 4), (64, 128, 2, 6, 4), (64, 256, 1, 5, 4), (64, 256, 2, 4, 4), (64, 256, 4, 4, 4)),
    32: ((64, 128, 1, 6, 4), (64, 256, 1, 4, 4), (64, 128, 2, 6, 4), (64, 256, 2, 4, 4), (64, 256, 4, 4, 4)),
    64: (
        (64, 128, 1, 5, 4), (64, 256, 1, 3, 4), (128, 128, 1, 4, 8), (64, 128, 2, 5, 4), (64, 256, 2, 4, 4),
        (128, 128, 2, 4, 8), (64, 128, 1, 4, 4), (64, 128, 1, 8, 4),
    ),
    128: (
        (64, 128, 1, 4, 4), (128, 128, 1, 4, 8), (64, 256, 1, 3, 4), (64, 128, 2, 4, 4), (128, 128, 2, 4, 8),
        (128, 128, 4, 4, 8), (64, 128, 4, 4, 4), (128, 128, 1, 3, 8),
    ),
    256: ((128, 128, 1, 3, 8), (64, 128, 1, 3, 8), (128, 128, 2, 3, 8), (64, 128, 2, 3, 8)),
}  # fmt: skip
_ROW_CODES = {
    16: (
        (64, 128, 1, 5, 4), (64, 128, 1, 4, 4), (128, 128, 1, 3, 8), (64, 256, 1, 4, 4), (64, 128, 2, 5, 4),
        (64, 256, 2, 4, 4), (64, 128, 4, 5, 4), (64, 256, 4, 4, 4), (128, 128, 1, 3, 4),
    ),
    32: (
        (64, 128, 1, 5, 4), (64, 128, 1, 4, 4), (128, 128, 1, 3, 8), (64, 128, 2, 5, 4), (64, 256, 2, 3, 4),
        (64, 128, 4, 5, 4), (64, 256, 4, 3, 4),
    ),
    64: (
        (64, 128, 1, 3, 4), (128, 128, 1, 4, 8), (64, 128, 2, 3, 4), (128, 128, 2, 4, 8), (64, 128, 4, 3, 4),
        (128, 128, 1, 3, 8),
    ),
}  # fmt: skip
# columns, splits, stages, warps
_DIGITS = (
    (64, 1, 5, 4), (64, 2, 5, 4), (64, 4, 5, 4), (64, 1, 8, 4), (64, 2, 8, 4), (128, 1, 5, 4), (128, 2, 5, 4),
    (128, 4, 5, 4), (128, 2, 5, 8), (64, 8, 5, 4), (64, 2, 3, 4), (64, 4, 3, 4),
)  # fmt: skip
# Of int4 and at most 16 rows; with 32 and more the kernels above were faster. Tiles of results, warps by
# results and by depth, pieces, splits, steps of W and of x in flight.
_STREAMED = (
    (1, 7, 2, 1, 1, 1, 3), (1, 8, 2, 1, 1, 1, 3), (1, 8, 2, 1, 4, 3, 3), (1, 4, 2, 1, 4, 2, 2),
    (1, 4, 1, 1, 4, 2, 3), (1, 8, 1, 1, 1, 3, 3), (1, 4, 2, 1, 2, 2, 3), (1, 8, 2, 1, 2, 3, 3),
)  # fmt: skip
# columns of results, tiles of x and of W on their way
_WIDE = ((96, 4, 6), (112, 3, 6), (128, 3, 5))
_WIDE_UNGATED = (
    (256, 4, 5, 1), (224, 4, 5, 1), (192, 4, 6, 1), (96, 4, 12, 1), (192, 4, 6, 2), (128, 4, 9, 2),
    (192, 4, 6, 3), (256, 4, 5, 4),
)  # fmt: skip
# For 65 to 128 rows: columns of results, tiles of x and of W on their way, splits, multiprocessors that share
# x. Of five such tilings and nine of products that are not gated, the only one that was ever the fastest.
_X_SHARED = ((112, 5, 5, 1, 2),)


def candidates(product: Product, rows: int) -> list[Choice]:
    """The kernels to try for a product of `rows` rows, the library first."""
    if isinstance(product.linear.weight, QuantizedWeight):
        return _of_quantized(product.linear.weight, rows)
    found: list[Choice] = [Library()]
    if rows == 1:
        found += [GemvTuning(*shape) for shape in _GEMV]
    tiles = (rows, _tile(rows)) if rows in (48, 96) else (_tile(rows),)
    found += [SkinnyTuning(tile, *shape) for tile in tiles for shape in _SKINNY.get(tile, ())]
    if rows > 128 and runs_here():
        found += _wide(product, _WIDE, _WIDE_UNGATED)
    if 64 < rows <= 128 and runs_here():
        found += _wide(product, _X_SHARED, ())
    return found


def _of_quantized(weight: QuantizedWeight, rows: int) -> list[Choice]:
    found: list[Choice] = [Library()]
    if rows == 1 and has_gemv(weight):
        by_int4 = weight.format.codes == "int4"
        found += [GemvTuning(*shape) for shape in (_INT4_GEMV if by_int4 else _QUANTIZED_GEMV)]
    tile = _tile(rows)
    found += [SkinnyTuning(tile, *s) for s in _QUANTIZED.get(tile, ()) if fits(weight.format, s[1])]
    if has_digits(weight):
        found += [DigitsTuning(min(128, tile), *shape) for shape in _DIGITS]
    if 1 < rows <= 16 and runs_here() and streamed_fits(weight, torch.bfloat16):
        found += [StreamedTuning(tile, *shape) for shape in _STREAMED]
    if rows > 1:
        on_the_way = (RowCodesTuning(tile, *shape) for shape in _ROW_CODES.get(tile, ()))
        found += [choice for choice in on_the_way if has_row_codes(weight, choice)]
    if rows > 1 and has_w8a8(weight):
        found += [W8A8Tuning(tile, *shape) for shape in _W8A8.get(tile, ())]
        if weight.format.codes == "fp8":
            found.append(W8A8Library())
    return found


def _tile(rows: int) -> int:
    """The rows of a tile of x: the power of two that holds them, 16 at least."""
    return max(16, 1 << (rows - 1).bit_length())


def _wide(
    product: Product, gated: tuple[tuple[int, ...], ...], ungated: tuple[tuple[int, ...], ...]
) -> Iterator[Choice]:
    if product.linear.bias is None and product.epilogue in WIDE_EPILOGUES:
        yield from (WideTuning(*shape) for shape in (gated if product.epilogue.gated else ungated))
