"""The GPUs of a host: how many there are, and which of them each worker gets. Imported by the two kinds of
cluster beside it and by the tests; it imports nothing of them.
"""
