"""The operators' view: metrics, status, recent rates and the state store. Reads the other packages and is
imported by `api` and the assembly only."""
