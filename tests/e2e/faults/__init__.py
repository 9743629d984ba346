"""Failures of processes, connections and clients, and what has to be noticed, freed or back within a time.
One process runs these tests, one by one: see `tests/conftest.py`."""
