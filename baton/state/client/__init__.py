"""The connection to Redis: its URL, a client with deadlines, and counts of calls. Imported by the stores of
`baton.state`, and by `baton up` for the URL.
"""
