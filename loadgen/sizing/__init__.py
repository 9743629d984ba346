"""How many prefill and decode workers a load needs, computed from a profile. Imports `loadgen.common` and
`baton.perf_model`;
`loadgen.commands` imports it.
"""
