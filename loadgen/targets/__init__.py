"""Sends one request to one kind of server and records the outcome. Imports `loadgen.load` and
`loadgen.common`; imported by `generator`, `goodput` and `commands`.
"""
