"""Blocks in device memory, for links that move them between devices: staging, the kernels that gather and
scatter pieces while computing their checksums, and their plain-torch references; and quantisation of blocks
for the wire.

Imported by `receiver`, `transports` and the worker's engine process. Importing `blocks`, `scatter`, `mover`
and `piece_memory` does not import torch.
"""
