"""The grpc transport: frames and pieces over a stream of a gRPC server of its own.

Imported by `transports.registry`, and by `transports.nccl` for its keepalive streams.
"""
