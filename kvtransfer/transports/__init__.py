"""The transports that move frames and bytes: grpc over the network, ipc through shared memory of one host,
nccl between GPUs; `registry` picks among them by the configured name.

Imported by `receiver` and by the assemblies that make a `Sender`; implements the interfaces of `link`.
"""
