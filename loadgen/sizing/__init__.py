"""Computes from a profile how many prefill and decode workers a load needs. Imports `loadgen.common` and
`baton.perf_model`; `loadgen.commands` imports it."""
