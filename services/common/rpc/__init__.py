"""gRPC servers and channels as every process makes them: limits, keepalive, health, the cluster's token.

Used by the router and the workers' fronts; torch-free.
"""
