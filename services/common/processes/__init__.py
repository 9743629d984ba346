"""Child processes: their protocol with their parent, their supervision, draining, and leaving no orphans.
Imported by the command line, the cluster, the router and the workers; imports neither torch nor grpc.
"""
