"""The PrefillService of a worker's front.

Torch-free: it forwards calls to the engine process. Imported by `services.worker.front` only.
"""
