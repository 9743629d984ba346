"""The workers as the router sees them: discovery, liveness, token streams, pools, placement, prefix
affinity, the waiting queue and cancels. Imported by `lifecycle`, `observability` and `api`; does not know
their types.
"""
