"""Responses that clients continue by their id: what is stored of one, and where. Imported by `lifecycle`,
`api`, `observability` and the assembly; it imports none of them.
"""
