"""Runs a load in several processes with one clock. Imports `loadgen.analysis` and below; `loadgen.goodput`
and `loadgen.commands` import it.
"""
