"""The receiving end of links: expected transfers and their pieces, links with their staging, and `Receiver`,
which one loop polls.

Imported by the worker's engine process and by benchmarks; imports `protocol`, `link`, `device` and the
registry of `transports`.
"""
