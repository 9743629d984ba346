"""Behaviour of the public APIs as clients see it."""
