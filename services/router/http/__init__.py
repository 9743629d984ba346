"""The HTTP server: connection limits, protocol timeouts, bodies, browser protection and error responses.
Knows nothing of requests or workers. Imported by `api`, `observability` and the assembly.
"""
