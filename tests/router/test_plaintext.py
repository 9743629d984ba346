"""Ports without TLS that other machines reach: a warning each, or a refusal where TLS is required."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from services.common.config.router import RouterConfig
from services.common.config.tls import PublicTls
from services.router.app import Router
from services.router.plaintext import check_plaintext

TLS = PublicTls(cert_file=Path("c"), key_file=Path("k"))
EVERYWHERE = {"host": "0.0.0.0", "http_port": 80, "grpc_port": 81, "admin_grpc_port": 82}


def config(**settings: Any) -> RouterConfig:
    return RouterConfig(model="m", served_model_name="m", **settings)


def warned(**settings: Any) -> list[str]:
    with capture_logs() as logs:
        check_plaintext(config(**settings))
    assert {log["event"] for log in logs} <= {"plaintext_port"}
    return [log["port"] for log in logs]


def test_warnings() -> None:
    assert warned() == []
    assert warned(**EVERYWHERE) == ["http_port 80", "grpc_port 81"]
    assert warned(**EVERYWHERE, public_tls=TLS) == []
    assert warned(**EVERYWHERE, public_tls=TLS, admin_host="10.0.0.7") == ["admin_grpc_port 82"]
    assert warned(admin_http_host="10.0.0.7") == []


def test_refusals() -> None:
    check_plaintext(config(**EVERYWHERE, public_tls=TLS, admin_http_host="10.0.0.7", require_tls=True))
    check_plaintext(config(require_tls=True))
    with pytest.raises(BatonError) as refusal:
        check_plaintext(config(**EVERYWHERE, require_tls=True))
    assert refusal.value.kind is ErrorKind.INVALID
    assert refusal.value.message == (
        "require_tls: plaintext: http_port 80 on 0.0.0.0 (no tls.public), "
        "grpc_port 81 on 0.0.0.0 (no tls.public)"
    )
    with pytest.raises(BatonError, match="admin_grpc_port 50052 on 10"):
        check_plaintext(config(admin_host="10.0.0.7", require_tls=True))


async def test_the_router_refuses_before_it_reads_its_model() -> None:
    with pytest.raises(BatonError, match="require_tls"):
        Router(config(**EVERYWHERE, require_tls=True))
