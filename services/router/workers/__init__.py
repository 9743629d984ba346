"""The workers as the router sees them: discovery, liveness, token streams, and what each has yet to compute.
Imported by `placement`, `queue`, `lifecycle`, `observability`, `api` and the assembly; does not know their
types.
"""
