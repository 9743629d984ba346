"""Sends one request to one kind of server and records the outcome. Independent of the generator; imports only
`loadgen.common` and `loadgen.load`.
"""
