"""Authentication of the public ports' clients by API keys: the keys, their tenants, and their checks over
HTTP and gRPC. Knows nothing of requests or workers. Imported by `observability` and the assembly.
"""
