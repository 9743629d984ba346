"""Issues a certificate for the addresses of this machine, for processes whose peers verify addresses."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.tls.material import parse_pair

# Clocks of peers may be behind.
_CLOCK_SKEW = datetime.timedelta(minutes=5)
_COMMON_NAME_LENGTH = 64
_USAGES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


@dataclass(frozen=True)
class IssuedCertificate:
    """A certificate, followed by its authority's chain, and its key; PEM."""

    chain: bytes
    key: bytes = field(repr=False)


def issue_certificate(
    authority_pem: bytes, authority_key_pem: bytes, hosts: Sequence[str]
) -> IssuedCertificate:
    """A certificate with a new P-256 key for `hosts` (IP addresses or DNS names, at least one), for servers
    and clients, valid as long as its authority. Raises ValueError with the reason."""
    authority = parse_pair(authority_pem, authority_key_pem).leaf
    if not _is_authority(authority):
        raise ValueError("the certificate is not an authority's (basicConstraints)")
    now = datetime.datetime.now(datetime.UTC)
    if now > authority.not_valid_after_utc:
        raise ValueError("the authority's certificate has expired")
    signer = serialization.load_pem_private_key(authority_key_pem, password=None)
    if not isinstance(
        signer,
        rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey,
    ):
        raise ValueError("the authority's key must be RSA, EC or Ed25519")
    key = ec.generate_private_key(ec.SECP256R1())
    common_name = x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:_COMMON_NAME_LENGTH])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([common_name]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(now - _CLOCK_SKEW, authority.not_valid_before_utc))
        .not_valid_after(authority.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_USAGES, critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, None if isinstance(signer, _OWN_HASH) else hashes.SHA256())
    )
    return IssuedCertificate(
        certificate.public_bytes(serialization.Encoding.PEM) + authority_pem,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


# Signatures that hash by themselves.
_OWN_HASH = (ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
