"""`baton ray certificate`: a Ray node has a certificate for its address, as long as its authority lasts."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from services.cli.main import main
from tests.certificates import Authority, Issued, write

ADDRESS = "10.1.2.3"


def _arguments(authority: Path, out: Path) -> list[str]:
    return ["ray", "certificate", "--authority", str(authority), "--out", str(out), "--host", ADDRESS]


def _folder(tmp_path: Path, issued: Issued) -> Path:
    folder = tmp_path / "authority"
    folder.mkdir()
    write(folder, issued, issued.pem)
    return folder


def _handshake(folder: Path, name: str) -> None:
    """A client that verifies `name` and a server that verifies the client's certificate, both of `folder`."""
    contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
    ends = []
    memory = [ssl.MemoryBIO(), ssl.MemoryBIO()]
    for context, mine, other in zip(contexts, memory, reversed(memory), strict=True):
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(folder / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
        server = context is contexts[0]
        ends.append(context.wrap_bio(other, mine, server, None if server else name))
    for _ in range(3):
        for end in reversed(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


@pytest.mark.parametrize("name", [ADDRESS, "127.0.0.1", "localhost"])
def test_peers_verify_the_address(tmp_path: Path, name: str) -> None:
    authority = Authority()
    out = tmp_path / "out"
    out.mkdir()
    assert main(_arguments(_folder(tmp_path, authority.issued), out)) == 0
    _handshake(out, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        _handshake(out, "10.1.2.4")
    assert (out / "tls.key").stat().st_mode & 0o777 == 0o600
    made = x509.load_pem_x509_certificate((out / "tls.crt").read_bytes())
    assert made.not_valid_after_utc == authority.issued.certificate.not_valid_after_utc
    assert (out / "ca.crt").read_bytes() == authority.pem


def _other_key(folder: Path) -> None:
    (folder / "tls.key").write_bytes(Authority().issued.key_pem)


def _no_authority(folder: Path) -> None:
    write(folder, Authority().issue("a.b"), b"")


def _no_certificate(folder: Path) -> None:
    (folder / "tls.crt").write_text("x")


REFUSED: dict[str, Callable[[Path], None]] = {
    "key": _other_key,
    "not an authority's": _no_authority,
    "no such file": lambda folder: (folder / "tls.crt").unlink(),
    "PEM certificate": _no_certificate,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str) -> None:
    folder = _folder(tmp_path, Authority().issued)
    REFUSED[reason](folder)
    assert main(_arguments(folder, tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert not (tmp_path / "tls.crt").exists()
