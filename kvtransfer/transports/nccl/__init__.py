"""The nccl transport: pieces from one GPU's memory to another's by NCCL, frames over a TCP socket.

Imported by `transports.registry`, `receiver` and the worker's engine process.
"""
