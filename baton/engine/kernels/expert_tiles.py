"""The tiles into which rows of a mixture of experts are cut, and the space that a pass keeps for them.
Torch-free."""

from __future__ import annotations

# Rows of a tile, where an expert has few rows, where it has many, and in steps of LIBRARY_ROWS rows and more.
FEW_ROWS, MANY_ROWS, MOST_ROWS = 16, 64, 128
# Passes of more rows are of prompts, or of enough sequences to fill their tiles.
MOST_ROWS_OF_DECODE = 256
# Rows from which on a step of experts in bf16 has tiles of MOST_ROWS, and its `down` is the vendor's grouped
# product.
LIBRARY_ROWS = 4096
# Experts for each entry up to which rows share many.
_EXPERTS_AN_ENTRY = 4


def rows_of_tile(rows: int) -> int:
    """Rows of a tile in passes of up to `rows` rows. By the pass, not by the step: in mode `exact` a row has
    the same tiles beside any others."""
    return FEW_ROWS if rows <= MOST_ROWS_OF_DECODE else MANY_ROWS


def most_tiles(rows: int, top_k: int, experts: int, tile_rows: int = FEW_ROWS) -> int:
    """The most tiles that rows take: a last one for each expert that has some, and those that are full."""
    entries = rows * top_k
    return min(experts, entries) + entries // tile_rows


def rows_by_entry(top_k: int, experts: int) -> int:
    """Largest number of rows of a step whose entries are computed one by one: the experts of few rows are
    seldom the same, so hardly one is read twice. A row's own never are."""
    return max(1, experts // (_EXPERTS_AN_ENTRY * top_k))


def space_bytes(
    rows: int, top_k: int, experts: int, hidden: int, inner: int, element_bytes: int, *, codes: str = ""
) -> int:
    """Bytes that mixtures need beside the workspace of a pass of up to `rows` rows: `ExpertsSpace`. `codes`:
    of the experts' weights, where these are quantised; with fp8, rows in 16 bits become codes, too. With
    weights of 16 bits, up to LIBRARY_ROWS rows have memory for their results; those of more rows are
    allocated by the library."""
    by_library = rows >= LIBRARY_ROWS and element_bytes == 2 and not codes
    tile_rows = MOST_ROWS if by_library else rows_of_tile(rows)
    places = most_tiles(rows, top_k, experts, tile_rows) * tile_rows
    results = LIBRARY_ROWS * top_k + places if by_library else rows * top_k
    values = rows * hidden + places * inner + results * hidden
    by_codes = codes == "fp8" and element_bytes == 2
    of_codes = max(rows * hidden, places * inner) + 4 * max(rows, places) if by_codes else 0
    return of_codes + values * element_bytes + 4 * (places + rows * (2 * top_k + experts))
