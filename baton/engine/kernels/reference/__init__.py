"""The arithmetic of a forward pass in plain torch: exact in every dtype, on any device, and what the GPU
kernels are tested against. Imported by `model` (the reference pass), by `sampling` and by benchmarks; the
full sampler's kernels import its constants. Imports nothing of `gpu`.
"""
