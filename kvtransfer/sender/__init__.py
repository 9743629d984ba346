"""The sending end of links: transfers and their blocks, links with their credits, the choice of a route, and
`Sender`, which one loop polls.

Imported by the worker's engine process and by benchmarks; imports `protocol`, `link` and `baton.device`'s
interfaces, but no transport: connectors are given to it.
"""
