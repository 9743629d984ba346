"""Code that the processes of a cluster share: configuration, child processes, gRPC, observability, the
channel between a worker's two processes, and the representations of an error at the public APIs.

Torch-free. Imported by `services.router`, `services.worker`, `services.prefill`, `services.decode`,
`services.cli` and `services.cluster`; imports none of them.
"""
