"""How errors travel over gRPC. Any package may import it."""
