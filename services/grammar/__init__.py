"""Guided decoding: which tokens an output's grammar allows next.

A worker's mask process (`process`) compiles grammars and computes masks; its front calls it (`client`).
Imported by the two servicers and by `services.worker.front`; torch-free.
"""
