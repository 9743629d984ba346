"""Matrix products of a step: one row (`gemv`), a few rows (`skinny_linear`), many rows on Hopper
(`wide_product`)."""
