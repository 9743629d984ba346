"""The search for the highest arrival rate that meets the limits. Imports `loadgen.generator` and below;
`loadgen.reports` and `loadgen.commands` import it.
"""
