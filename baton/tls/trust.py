"""Verifies certificate chains that were not presented in a handshake, such as those of registry entries."""

from __future__ import annotations

from cryptography import x509
from cryptography.x509 import verification
from cryptography.x509.verification import Criticality, ExtensionPolicy, Policy

from baton.tls.material import Chain


def verify(chain: Chain, authorities: bytes, dns_name: str) -> None:
    """Raises ValueError unless the chain leads to an authority, is valid now, and has this DNS name.

    RFC 5280 path validation by `cryptography`. Beyond it only what makes an authority one is required, where
    the Web PKI demands more extensions than private authorities commonly have.
    """
    builder = (
        verification.PolicyBuilder()
        .store(verification.Store(x509.load_pem_x509_certificates(authorities)))
        .extension_policies(ca_policy=_authority_policy(), ee_policy=_leaf_policy())
    )
    try:
        builder.build_server_verifier(x509.DNSName(dns_name)).verify(chain.leaf, list(chain.certificates[1:]))
    except verification.VerificationError as error:
        raise ValueError(f"the certificate is not one of {dns_name}: {error}") from error


def _leaf_policy() -> ExtensionPolicy:
    return ExtensionPolicy.permit_all().require_present(
        x509.SubjectAlternativeName, Criticality.AGNOSTIC, None
    )


def _authority_policy() -> ExtensionPolicy:
    return (
        ExtensionPolicy.permit_all()
        .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, _is_authority)
        .may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, _signs_certificates)
    )


def _is_authority(policy: Policy, certificate: x509.Certificate, extension: x509.BasicConstraints) -> None:
    if not extension.ca:
        raise ValueError("an issuer is no authority")


def _signs_certificates(
    policy: Policy, certificate: x509.Certificate, extension: x509.KeyUsage | None
) -> None:
    if extension is not None and not extension.key_cert_sign:
        raise ValueError("an issuer may not sign certificates")
