"""NCCL channels between two processes' GPUs: the library's calls, and a connection over them.

Imported by kvtransfer's NCCL transport, the workers and benchmarks; it imports only the rest of
`baton.device`.
"""
