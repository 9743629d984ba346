"""`python -m services.cluster.detached`: the process of `baton supervise`: workers on an existing Ray
cluster. They outlive it, and it adopts them when it is started again. Its Ray node is one of its own without
resources, since Ray serves only programs beside one of its nodes. Imports `services.cluster` and, for probes
and metrics, `services.cluster.group`; nothing imports it.
"""
