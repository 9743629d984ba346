"""Random requests to both public ports, from a seed."""
