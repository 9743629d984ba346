"""Certificates for tests: authorities, and what they issue."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common.config.tls import InternalTls

DOMAIN = "test.baton.internal"


@dataclass(frozen=True)
class Issued:
    """A certificate with its key, in PEM."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


class Authority:
    """Issues certificates, by default valid from yesterday until tomorrow."""

    def __init__(self, name: str = "authority", issuer: Authority | None = None) -> None:
        """`issuer`: None: it is self-signed."""
        self.issued: Issued = _issue(name, (), None if issuer is None else issuer.issued, authority=True)

    @property
    def pem(self) -> bytes:
        return self.issued.pem

    def issue(self, *names: str, days: float = 1) -> Issued:
        """A certificate for these DNS names and addresses that expires in `days`."""
        return _issue(names[0], names, self.issued, days=days)

    def of_role(self, role: str, days: float = 1) -> Issued:
        """A certificate for the name `ROLE.DOMAIN`, valid for `days`."""
        return self.issue(f"{role}.{DOMAIN}", days=days)

    def internal(self, folder: Path, role: str, days: float = 1) -> InternalTls:
        """The configuration of a process of this role, whose files are in `folder`/`role`."""
        own = folder / role
        own.mkdir(exist_ok=True)
        write(own, self.of_role(role, days), self.pem)
        return InternalTls(
            cert_file=own / "tls.crt", key_file=own / "tls.key", ca_file=own / "ca.crt", domain=DOMAIN
        )


def write(folder: Path, issued: Issued, authorities: bytes) -> None:
    """Writes tls.crt, tls.key and ca.crt."""
    (folder / "tls.crt").write_bytes(issued.pem)
    (folder / "tls.key").write_bytes(issued.key_pem)
    (folder / "ca.crt").write_bytes(authorities)


def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context for 127.0.0.1, and the file that says whom to trust."""
    issued = _issue("127.0.0.1", ("127.0.0.1",), None)
    public, private = folder / "public.pem", folder / "private.pem"
    public.write_bytes(issued.pem)
    private.write_bytes(issued.key_pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(public, private)
    return context, public


def _issue(
    common_name: str,
    names: Sequence[str],
    issuer: Issued | None,
    *,
    authority: bool = False,
    days: float = 1,
) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
    if authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    if names:
        subjects = x509.SubjectAlternativeName([_subject(name) for name in names])
        builder = builder.add_extension(subjects, critical=False)
    return Issued(builder.sign(key if issuer is None else issuer.key, hashes.SHA256()), key)


def _subject(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def client_context(authorities: bytes, issued: Issued | None, folder: Path) -> ssl.SSLContext:
    """A client's context that trusts these authorities and expects no certain name; `issued`: its
    certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=authorities.decode())
    if issued is not None:
        both = folder / "client.pem"
        both.write_bytes(issued.pem + issued.key_pem)
        context.load_cert_chain(both)
    return context


def answer_over_tls(address: str, context: ssl.SSLContext | None, request: bytes) -> bytes:
    """Returns the bytes that a server sends back for `request`, after the handshake, until it closes or 0.5 s
    pass. `context` None: in plaintext. Empty where the server refuses the connection."""
    host, _, port = address.rpartition(":")
    answer = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as plain:
            sock = plain if context is None else context.wrap_socket(plain)
            with sock:
                sock.sendall(request)
                sock.settimeout(0.5)
                while received := sock.recv(65536):
                    answer += received
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        pass
    return answer
