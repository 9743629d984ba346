"""Requests from admission to the last token: admission, dispatch, attempts on workers, cancels, delivery of
output, timeline and journal. Imported by `api`, `observability` and the assembly.
"""
