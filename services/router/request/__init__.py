"""A request as data: parsed and admitted requests, output deltas, size limits and validation. Has no I/O
and imports no other package of the router; every other package may import it.
"""
