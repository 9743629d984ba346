"""Goodput of serving arrangements beside one another: arms, servers, runs, the ideal, table and plot. Imports
`loadgen`; nothing imports it.
"""
