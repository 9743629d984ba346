"""Measures KV links between processes and GPUs. Imports `bench.decode`, `bench.cluster` and `bench.nccl`;
nothing imports it.
"""
