"""Arrivals, prompts and traces, independent of sending. Imports `loadgen.common` alone; imported by
`targets`, `generator` and `commands`.
"""
