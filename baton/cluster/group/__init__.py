"""`python -m baton.cluster.group`: the process of `baton worker-group`, which runs the workers of one
container.

The workers are started, watched and restarted as those of `baton up` without Ray (`PlainCluster`). Added here
are probes, metrics and a stop within a promised time. `baton.cluster.detached` has its probes and metrics.
"""
