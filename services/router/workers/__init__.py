"""The workers as the router sees them: discovery, liveness, token streams, pools, placement, prefix
affinity and cancels. Imported by `queue`, `lifecycle`, `observability` and `api`; does not know their types.
"""
