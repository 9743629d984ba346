"""A worker: its two processes. `front` serves gRPC and registers the worker; `engine` computes.

The folder between the two is the process boundary: they share `services.common.engine` and the rings in
shared memory, and import nothing from each other. Imported by nothing else; `services.cluster` and `baton
worker` start it as a process.
"""
