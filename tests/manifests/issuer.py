"""Does what cert-manager does with the chart's issuers and certificates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.certificates import Authority, Issued
from tests.manifests.fields import Fields
from tests.manifests.manifests import read_metadata

Secret = dict[str, str]


def secret_of(issued: Issued, authorities: bytes) -> Secret:
    """A certificate as Secrets have it."""
    return {
        "tls.crt": issued.pem.decode(),
        "tls.key": issued.key_pem.decode(),
        "ca.crt": authorities.decode(),
    }


class CertManager:
    """Issues the rendered certificates. `authorities`: by the Secret of each."""

    def __init__(self) -> None:
        self.authorities: dict[str, Authority] = {}
        self._issuers: dict[str, str | None] = {}

    def secrets(self, manifests: Iterable[Mapping[str, Any]]) -> dict[str, Secret]:
        """The Secrets of all Certificates, by name; each call issues new ones, by the same authorities."""
        made = list(manifests)
        for manifest in made:
            if manifest["kind"] == "Issuer":
                self._read_issuer(manifest)
        certificates = [one for one in made if one["kind"] == "Certificate"]
        # An authority first: the others are issued by it.
        certificates.sort(key=lambda one: not one["spec"].get("isCA", False))
        return dict(self._issue(one) for one in certificates)

    def _read_issuer(self, manifest: Mapping[str, Any]) -> None:
        with Fields(manifest, "Issuer") as top:
            top.ignore("apiVersion", "kind")
            name, _ = read_metadata(top)
            with top.section("spec") as spec:
                spec.expect("selfSigned", {})
                with spec.section("ca") as authority:
                    self._issuers[name] = authority.take("secretName", None)

    def _issue(self, manifest: Mapping[str, Any]) -> tuple[str, Secret]:
        with Fields(manifest, "Certificate") as top:
            top.ignore("apiVersion", "kind")
            read_metadata(top)
            with top.section("spec") as spec:
                spec.ignore("duration", "renewBefore", "commonName")
                spec.expect("privateKey", *_ECDSA)
                spec.expect("usages", ["digital signature", "server auth", "client auth"])
                secret, names = spec.take("secretName"), spec.take("dnsNames", [])
                with spec.section("issuerRef") as issuer:
                    issuer.expect("kind", "Issuer")
                    by = self._issuers[issuer.take("name")]
                if spec.take("isCA", False):
                    assert by is None, "an authority signs itself"
                    authority = self.authorities.setdefault(secret, Authority(secret))
                    return secret, secret_of(authority.issued, authority.pem)
        assert by is not None
        authority = self.authorities[by]
        return secret, secret_of(authority.issue(*names), authority.pem)


_ECDSA = (
    {"algorithm": "ECDSA", "size": 256},
    {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
)
