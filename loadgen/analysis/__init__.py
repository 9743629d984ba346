"""Computes figures and their intervals from request records, and checks the validity of a run."""
