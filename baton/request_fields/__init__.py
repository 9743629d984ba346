"""The fields of a request: one table, from which bodies, validation, OpenAPI, documentation, the client's
arguments and the engine's sampling parameters are made. Torch-free, without dependencies; imported by the
client, the engine, router and workers.
"""
