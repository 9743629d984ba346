"""A model as seen by code that does not compute it: its files, its KV layout, block hashes.
Torch-free; any package may import it.
"""
