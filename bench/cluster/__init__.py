"""Measures whole clusters: overhead of router and workers with fake engines, clusters on GPUs, accuracy of
loadgen.

Imported by `bench.nccl` and `bench.transfer`.
"""
