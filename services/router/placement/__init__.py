"""Chooses the workers that a request is placed on: pools, prefix affinity, predicted latencies, and the
claims of placed requests. Imported by `queue`, `lifecycle`, `observability`, `processes`, `api` and the
assembly; it calls no worker."""
