"""Ports of a pod that listen, those among them for other processes of the cluster, and the clients they
answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.certificates import Authority, Issued, answer_over_tls, client_context
from tests.deploy.chart import Object
from tests.manifests.pod import Pod

_LISTEN = "0A"
# A client's first bytes of HTTP/2.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
# TLS's record of an alert: a refusal in plaintext.
_ALERT = b"\x15\x03"


def listening(pod: Pod) -> set[int]:
    """Ports of the pod that listen beyond its loopback."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pod.pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, port = local.partition(":")
            # Addresses are words of this machine's order: the first byte is the last.
            if state == _LISTEN and not address.endswith("7F"):
                found.add(int(port, 16))
    return found


def internal(pod: Pod) -> set[int]:
    """The ports that speak to other processes of the cluster: gRPC of workers, and links. Probes and metrics
    are plain HTTP by design, the router's ports the public's."""
    named = {port: name for name, port in pod.template.container.ports.items()}
    plain = ("admin", "metrics-", "http", "grpc")
    others = {port for port, name in named.items() if name in plain or name.startswith("metrics-")}
    return listening(pod) - others


def strangers(
    servers: Authority, clients: Authority, name: str, folder: Path
) -> Iterator[tuple[str, ssl.SSLContext | None]]:
    """Clients that get nothing. `servers`: the authority that they trust; `clients`: that of those who are
    answered; `name`: the DNS name in their certificates, which one that is answered would have."""
    yield "plaintext", None
    yield "no certificate", calling_context(servers, None, folder)
    yield "a foreign certificate", calling_context(servers, Authority("foreign").issue(name), folder)
    yield "an expired certificate", calling_context(servers, clients.issue(name, days=-1), folder)


def calling_context(authority: Authority, issued: Issued | None, folder: Path) -> ssl.SSLContext:
    """The TLS context of a gRPC client with this certificate."""
    context = client_context(authority.pem, issued, folder)
    context.set_alpn_protocols(["h2"])
    return context


async def answer(pod: Pod, port: int, context: ssl.SSLContext | None) -> bytes:
    """The answer of a port to a client's first bytes, refusals by TLS itself excepted."""
    answered = await asyncio.to_thread(answer_over_tls, f"{pod.address}:{port}", context, _PREFACE)
    return b"" if answered.startswith(_ALERT) else answered


def served_certificate(pod: Pod, port: int, authority: Authority, client: Issued, folder: Path) -> str:
    """The certificate that a port presents, in PEM."""
    context = calling_context(authority, client, folder)
    address = (pod.address, port)
    with socket.create_connection(address, timeout=5) as plain, context.wrap_socket(plain) as wrapped:
        presented = wrapped.getpeercert(binary_form=True)
    assert presented is not None
    return ssl.DER_cert_to_PEM_cert(presented)


def allowed_ports(policies: Mapping[str, Object], pod: Pod) -> set[int]:
    """Ports that the NetworkPolicies let any peer reach of a pod."""
    allowed: set[int] = set()
    for policy in policies.values():
        spec = policy["spec"]
        if spec["podSelector"]["matchLabels"].items() <= pod.template.labels.items():
            for rule in spec.get("ingress", []):
                for port in rule.get("ports", []):
                    allowed |= {*range(port["port"], port.get("endPort", port["port"]) + 1)}
    return allowed
