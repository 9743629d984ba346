"""A taken port is found before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from baton.base.errors import BatonError
from services.cli.main import main
from services.cli.up.command import require_free_ports
from services.common.config.settings_tree.settings import Settings


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--admin-grpc-port", "--admin-http-port"])
def test_port_in_use(
    flag: str,
    taken: int,
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ports = {"--http-port": "0", "--grpc-port": "0", flag: str(taken)}
    assert main(["up", *(word for pair in ports.items() for word in pair)]) == 2
    assert capsys.readouterr().err == (
        f"baton: error: cannot listen on 127.0.0.1:{taken} ({flag}): Address already in use\n"
    )


def test_one_port_for_two_listeners() -> None:
    with pytest.raises(BatonError, match="port 81 is named for both"):
        require_free_ports(Settings.model_validate({"router": {"http_port": 81, "grpc_port": 81}}))
