"""`python -m services.cluster.group`: the process of `baton worker group`, which runs the workers of one
container, and of `baton ray supervise`, which runs those of an existing Ray cluster. They are started,
watched and restarted as those of `baton up`; added here are probes, metrics and a stop within a promised
time.
Imports `services.cluster`; nothing imports it.
"""
