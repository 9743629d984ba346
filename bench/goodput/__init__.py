"""Goodput of serving arrangements beside one another: arms, workloads, runs, the ideal, table and plot.
Imports `bench.cluster` and `loadgen`; nothing imports it.
"""
