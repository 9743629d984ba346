"""What a model is to those that do not compute it: its files, the layout of its KV cache, block hashes.
Torch-free; any package may import it.
"""
