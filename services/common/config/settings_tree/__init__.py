"""The one tree of settings, as a list and by the view of each command, and what reads it: file, environment,
flags and files of secrets. Imported by the command line, the schema of the chart and the programs that are
given secrets; the configurations beside it import nothing of it.
"""
