"""`baton check` over TLS: it trusts the configured authorities and verifies the name."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.base.errors import BatonError
from baton.client.tls import Tls
from services.cli.check.command import Check
from services.cli.check.target import Target
from tests.certificates import self_signed


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, *arguments: object) -> None:
        """Keeps requests out of the output."""


class _Server(http.server.HTTPServer):
    def handle_error(self, *arguments: object) -> None:
        """A client that refuses the certificate is expected."""


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """An HTTPS and a gRPC server with a certificate for 127.0.0.1."""
    context, authorities = self_signed(tmp_path)
    https = _Server(("127.0.0.1", 0), _Answers)
    https.socket = context.wrap_socket(https.socket, server_side=True)
    thread = threading.Thread(target=https.serve_forever, args=(0.01,))
    thread.start()
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    private = (tmp_path / "private.pem").read_bytes()
    credentials = grpc.ssl_server_credentials([(private, authorities.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield {
        "http": f"https://127.0.0.1:{https.server_address[1]}",
        "grpc": f"127.0.0.1:{port}",
        "model": "chat",
        "tls": {"ca_file": str(authorities)},
    }
    server.stop(None).wait()
    https.shutdown()
    thread.join()
    https.server_close()


def check(settings: dict[str, Any], step: str, within_s: float = 5.0) -> str:
    return Check(Target(**{**settings, "tls": Tls(**settings["tls"])})).steps[step](
        time.monotonic() + within_s
    )


def test_the_configured_authority(settings: dict[str, Any]) -> None:
    assert check(settings, "GET /health") == "ok"
    assert check(settings, "grpc.health.v1") == "SERVING"


@pytest.mark.parametrize("step", ["GET /health", "grpc.health.v1"])
@pytest.mark.parametrize("tls", [{"server_name": "chat.example.com"}, {"ca_file": "/nowhere/ca.crt"}])
def test_another_name_or_authority_is_refused(
    settings: dict[str, Any], step: str, tls: dict[str, str]
) -> None:
    """Without `ca_file` the system's authorities are used, which do not know this certificate."""
    with pytest.raises(BatonError):
        check({**settings, "tls": {**settings["tls"], **tls}}, step, 0.5)
