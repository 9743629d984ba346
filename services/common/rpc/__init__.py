"""gRPC servers and channels as every process makes them: limits, keepalive, health, the cluster's token.
Imported by the cluster, the router, the workers' fronts and, for the TLS of links, their engines; torch-free.
"""
