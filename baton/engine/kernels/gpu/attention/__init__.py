"""Attention over the paged KV cache: split decode attention, and prompt attention in parts that are joined by
their sums of exponentials. Imported by the GPU passes of `decode` and `prefill`, by `forward`, by the fused
kernels of `step`, and by benchmarks.
"""
