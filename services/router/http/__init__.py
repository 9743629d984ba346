"""The HTTP server: connection limits, protocol timeouts, bodies, browser protection and error responses.
Independent of requests and workers. Imported by `api`, `observability` and the assembly.
"""
