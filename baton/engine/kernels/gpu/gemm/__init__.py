"""Matrix products of a step: one row (`gemv`), a few rows (`skinny_linear`), many rows on Hopper
(`wide_product`), each for quantised weights too, and the codes of rows that they multiply (`quantize_rows`).
Imported by `forward`, which chooses among them, by `tuning`, which measures them, and by the fused kernels of
`experts` and `step`.
"""
