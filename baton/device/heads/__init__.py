"""Blocks of a KV cache whose heads are divided among the devices of a worker: moves between them and whole
blocks, by a kernel of the first device or on a CPU.

Imported by `baton.engine.memory` and `kvtransfer.device`.
"""
