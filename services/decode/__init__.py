"""The DecodeService of a worker's front, and the output streams that routers follow.

Torch-free: reservations go to the engine process, tokens come from the output ring in shared memory.
Imported by `services.worker.front` only.
"""
