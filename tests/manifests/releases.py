"""The releases that are run: values-cpu.yaml in each topology, in plaintext or with TLS everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.certificates import Authority, write
from tests.deploy.chart import RELEASE, Rendered, render_with
from tests.manifests.issuer import Secret, secret_of

Topology = Literal["node", "split", "ray"]
NAME = f"{RELEASE}-baton"
TEST = f"{NAME}-test"
_PUBLIC = {"enabled": True, "existingSecret": "public-tls", "clientCASecret": "client-ca"}
_INTERNAL = {"enabled": True, "certManager": True}


def rendered(topology: Topology, *, tls: bool, drain_s: int = 5) -> Rendered:
    """`ray`: topology node under Ray; `drain_s`: seconds that a stopping router still serves."""
    changes: dict[str, Any] = {"lifecycle__drainSeconds": drain_s}
    if topology == "ray":
        changes["ray__enabled"] = True
    else:
        changes["topology"] = topology
    if tls:
        changes |= {"tls__public": _PUBLIC, "tls__internal": _INTERNAL, "test__tlsSecret": "test-client"}
    return render_with("cpu", **changes)


@dataclass
class OwnCertificates:
    """What the release with TLS finds in its namespace: a public certificate, and clients' authority."""

    servers: Authority = field(default_factory=lambda: Authority("servers"))
    clients: Authority = field(default_factory=lambda: Authority("clients"))

    def secrets(self) -> dict[str, Secret]:
        """Issued anew by each call. `test-client` is that of `helm test`."""
        public = self.servers.issue(NAME, f"{NAME}.llm.svc")
        client = self.clients.issue("test-client")
        return {
            "public-tls": secret_of(public, self.servers.pem),
            "client-ca": {"ca.crt": self.clients.pem.decode()},
            "test-client": secret_of(client, self.servers.pem),
        }

    def client_folder(self, folder: Path) -> Path:
        """Files of a client."""
        folder.mkdir()
        write(folder, self.clients.issue("a client"), self.servers.pem)
        return folder
