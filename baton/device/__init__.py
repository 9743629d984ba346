"""What a process uses of its GPU and its host below the level of models: CUDA's runtime and streams, NCCL
channels, graphs, memory that processes share, compiled kernels, and the vendor's libraries. Each has a twin
for a CPU, or an interface of which a CPU needs none.

Imported by `baton.engine`, `kvtransfer`, the workers and benchmarks; imports nothing of them.
"""
