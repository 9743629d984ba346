"""The front process of a worker: starts and watches the engine process, serves gRPC and metrics, registers
the worker.

Torch-free; mounts the servicers of `services.prefill` and `services.decode` by role. Imported only by
`services.worker.__main__`.
"""
