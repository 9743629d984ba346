"""Numbers of rows to which prompts' products are padded. Torch-free."""

from __future__ import annotations


def product_rows(rows: int) -> int:
    """Pads `rows` to a number that products may have: a multiple of 64, beyond 512 of 128, and beyond 2,560
    of 256 (a worker's steps have 2,048 at most, and the rows that join them). The vendor's library looks for
    the best way for every number of rows, and loads what it has not had yet, so there are only as many
    numbers as can be warmed up."""
    step = 64 if rows <= 512 else 128 if rows <= 2560 else 256
    return -(-rows // step) * step
