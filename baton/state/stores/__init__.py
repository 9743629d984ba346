"""The stores: their protocols, records and sealed entries, and one implementation of each in Redis.

Imported by the parts of `baton.state` beside it, which keep the stores up to date in the background; a
process takes them from a `State`. It imports `baton.state.client` alone.
"""
