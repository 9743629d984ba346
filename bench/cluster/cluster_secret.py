"""The secret of a benchmark's cluster: benchmarks call its workers directly."""

from __future__ import annotations

from baton.base.cluster_auth import RpcToken

CLUSTER_SECRET = "the secret of a measurement's cluster"
METADATA = RpcToken(CLUSTER_SECRET).metadata
