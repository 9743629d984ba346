"""A certificate chain, its private key and authorities, as they were in the files at one time."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

# Certificates of a file, as a bound: a chain or a bundle of authorities.
_MAX_CERTIFICATES = 512


@dataclass(frozen=True)
class Chain:
    """A certificate and the intermediate ones that lead to an authority, the certificate first."""

    pem: bytes
    certificates: tuple[x509.Certificate, ...] = field(repr=False, compare=False)

    @property
    def leaf(self) -> x509.Certificate:
        """The certificate itself, without its intermediates."""
        return self.certificates[0]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hex digits."""
        return hashlib.sha256(self.leaf.public_bytes(serialization.Encoding.DER)).hexdigest()

    @property
    def dns_names(self) -> tuple[str, ...]:
        """The DNS names in the certificate's subjectAltName, in lower case."""
        try:
            names = self.leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except (x509.ExtensionNotFound, ValueError):
            return ()
        return tuple(name.lower() for name in names.value.get_values_for_type(x509.DNSName))

    @property
    def leaf_pem(self) -> bytes:
        """The leaf certificate alone, in PEM."""
        return self.leaf.public_bytes(serialization.Encoding.PEM)

    def expired(self, now: datetime.datetime | None = None) -> bool:
        """True once the certificate's validity has ended."""
        return (now or datetime.datetime.now(datetime.UTC)) > self.leaf.not_valid_after_utc


@dataclass(frozen=True)
class Material:
    """A chain with its key, and authorities; the latter are empty where none are configured."""

    chain: Chain
    key: bytes = field(repr=False)
    authorities: bytes = b""


def parse_chain(pem: bytes) -> Chain:
    """Parses one or more PEM certificates, the first of which is the leaf. Raises ValueError."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError("it has no valid PEM certificate") from error
    if len(certificates) > _MAX_CERTIFICATES:
        raise ValueError(f"it has more than {_MAX_CERTIFICATES} certificates")
    return Chain(pem, tuple(certificates))


def parse_pair(chain_pem: bytes, key_pem: bytes) -> Chain:
    """Parses a chain and verifies that the key is the leaf's. Raises ValueError with the reason."""
    chain = parse_chain(chain_pem)
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Without the cause: its text may quote the file.
        raise ValueError("the key file has no unencrypted PEM private key") from None
    if _public_bytes(key.public_key()) != _public_bytes(chain.leaf.public_key()):
        raise ValueError("the private key does not belong to the certificate")
    return chain


def _public_bytes(key: object) -> bytes:
    encoded = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return bytes(encoded)
