"""The nccl transport: pieces from the memory of one GPU to that of another by NCCL, frames over a TCP socket.

Imported by `transports.registry`, `receiver` and the worker's engine process.
"""
