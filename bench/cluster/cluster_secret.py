"""The secret of a measurement's cluster: benches call its workers past the router."""

from __future__ import annotations

from baton.cluster_auth import RpcToken

CLUSTER_SECRET = "the secret of a measurement's cluster"
METADATA = RpcToken(CLUSTER_SECRET).metadata
