"""Matrix products of a step: one row (`gemv`), a few rows (`skinny_linear`), many rows on Hopper
(`wide_product`), each for quantised weights too. Imported by `forward`, which chooses among them, by
`tuning`, which measures them, and by the fused kernels of `step`.
"""
