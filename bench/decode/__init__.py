"""Measures decode steps of one engine on a GPU, and tunes matrix products. Imported by `bench.transfer`."""
