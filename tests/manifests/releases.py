"""The releases that are run: values-cpu.yaml in each topology, in plaintext with the secrets of its values or
with TLS everywhere, own secrets, and API keys, which belong to tenants in topology split."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.certificates import Authority, write
from tests.deploy.chart import RELEASE, Rendered, render_with
from tests.manifests.issuer import Secret, secret_of

Topology = Literal["node", "split", "ray"]
NAME = f"{RELEASE}-baton"
TEST = f"{NAME}-test"
_PUBLIC = {"enabled": True, "existingSecret": "public-tls", "clientCASecret": "client-ca"}
_INTERNAL = {"enabled": True, "certManager": True}


def rendered(topology: Topology, *, tls: bool, drain_s: int = 5, **more: Any) -> Rendered:
    """`ray`: topology node under Ray; `drain_s`: seconds that a stopping router still serves; `more`: changes
    as `render_with` takes them."""
    changes: dict[str, Any] = {"lifecycle__drainSeconds": drain_s, **more}
    if topology == "ray":
        changes["ray__enabled"] = True
    else:
        changes["topology"] = topology
    if tls:
        changes |= {"tls__public": _PUBLIC, "tls__internal": _INTERNAL, "test__tlsSecret": "test-client"}
        if topology == "split":
            changes |= {"auth": {"enabled": True, "tenantsSecret": "tenants"}}
            changes |= {"test__apiKeySecret": "api-keys"}
        else:
            changes |= {"auth": {"enabled": True, "existingSecret": "api-keys"}}
        changes |= {
            "secrets": {"existingSecret": "own-secrets", "values": {"redisPassword": "redisPasswordForTests"}}
        }
    return render_with("cpu", **changes)


@dataclass
class OwnCertificates:
    """Objects that the release with TLS finds in its namespace: secrets, a public certificate, clients'
    authority."""

    servers: Authority = field(default_factory=lambda: Authority("servers"))
    clients: Authority = field(default_factory=lambda: Authority("clients"))
    api_keys: tuple[str, ...] = ("the-first-key",)

    def secrets(self) -> dict[str, Secret]:
        """Secrets that each call issues again. `test-client` is that of `helm test`."""
        public = self.servers.issue(NAME, f"{NAME}.llm.svc")
        client = self.clients.issue("test-client")
        return {
            "own-secrets": {
                "cluster-secret": "a cluster secret of one's own",
                "prefix-secret": "a prefix secret of one's own",
                "journal-key": "0f" * 32,
                "ray-token": "a token of Ray of one's own",
            },
            "api-keys": {"api-keys": "".join(f"{key}\n" for key in self.api_keys)},
            "tenants": {"tenants": self._tenants()},
            "public-tls": secret_of(public, self.servers.pem),
            "client-ca": {"ca.crt": self.clients.pem.decode()},
            "test-client": secret_of(client, self.servers.pem),
        }

    def _tenants(self) -> str:
        """A tenant with a limit that the tests' load stays below."""
        hashes = [hashlib.sha256(key.encode()).hexdigest() for key in self.api_keys]
        limits = {"requests_per_minute": 100_000, "concurrent_requests": 64}
        return yaml.safe_dump({"tenants": [{"name": "acme", "keys_sha256": hashes, "limits": limits}]})

    def client_folder(self, folder: Path) -> Path:
        """Writes a client's certificate files and returns their folder."""
        folder.mkdir()
        write(folder, self.clients.issue("a client"), self.servers.pem)
        return folder
