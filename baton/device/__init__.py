"""A process's access to its GPU and its host below the level of models: CUDA's runtime and streams, NCCL
channels, graphs, memory that processes share, compiled kernels, and the vendor's libraries. Each has a twin
for a CPU, or an interface that a CPU needs no implementation of.

Imported by `baton.engine`, `kvtransfer`, the workers and benchmarks; imports nothing of them.
"""
