"""`python -m services.cluster.group`: the process of `baton worker-group`, which runs the workers of one
container. They are started, watched and restarted as those of `baton up` without Ray (`PlainCluster`); added
here are probes, metrics and a stop within a promised time. Imports `services.cluster`;
`services.cluster.detached` imports it for its probes and metrics.
"""
