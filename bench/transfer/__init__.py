"""Measures KV links between processes and GPUs. Imports `bench.decode`; nothing imports it."""
