"""How many prefill and decode workers a load needs, computed from measured rates. Imports `loadgen.common`;
`loadgen.commands` imports it.
"""
