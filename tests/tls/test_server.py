"""Calls are admitted by what gRPC says of their connection."""

from __future__ import annotations

import pytest

from baton.tls.material import Material
from baton.tls.server import ServerTls

NAMES = {"peer_dns": (b"decode.baton",)}


def unused() -> Material:
    raise AssertionError("no connection is made")


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (NAMES | {"ssl_tls_version": (b"TLSv1.3",)}, ""),
        (NAMES | {"ssl_tls_version": (b"TLSv1.2",)}, "TLS 1.3 is required"),
        (NAMES, "the TLS version is not known: grpcio 1.85 or later is required"),
        ({"peer_dns": (b"other",), "ssl_tls_version": (b"TLSv1.3",)}, "the certificate is not of a role"),
    ],
    ids=["admitted", "older version", "no version", "other name"],
)
def test_who_is_admitted(context: dict[str, tuple[bytes, ...]], expected: str) -> None:
    tls = ServerTls(unused, client_certificates=True, admitted=["decode.baton"])
    assert tls.refusal(context).startswith(expected)
    assert bool(tls.refusal(context)) == bool(expected)
    assert ServerTls(unused, client_certificates=True).refusal(context) == ""
