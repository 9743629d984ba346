"""Clients written elsewhere, each in its own environment, run unchanged against a cluster."""
