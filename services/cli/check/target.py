"""Subject of a `baton check`, from its flags."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from baton.client.tls import Tls
from services.common.config.settings_tree.reader import invalid

_ADDRESS = re.compile(r"(\[[^]]+\]|[^:\s]+):\d{1,5}")
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """A router as its clients reach it. `api_keys_file`: the first of its keys is used. `tls`: of both APIs,
    where `http` is https."""

    http: str
    grpc: str
    model: str
    timeout_s: float = _TIMEOUT_S
    api_keys_file: Path | None = None
    tls: Tls = field(default_factory=Tls)

    @property
    def uses_tls(self) -> bool:
        """Returns True where both ports speak TLS."""
        return self.http.startswith("https:")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--http", metavar="URL", required=True, help="base URL, http:// or https://")
    parser.add_argument("--grpc", metavar="HOST:PORT", required=True, help="address of the gRPC API")
    parser.add_argument("--model", metavar="NAME", required=True, help="name of the model")
    text = f"longest time for everything (default {_TIMEOUT_S:g})"
    parser.add_argument("--timeout-s", type=float, metavar="S", default=_TIMEOUT_S, help=text)
    parser.add_argument("--api-keys-file", type=Path, metavar="FILE", help="API keys; the first one is used")
    text = "authorities, PEM (default, and where it is not there: those of the system)"
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--cert-file", type=Path, metavar="FILE", help="the client's certificate, PEM")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="its private key, PEM")
    text = "name of the server's certificate (default: the address's host)"
    parser.add_argument("--server-name", metavar="NAME", help=text)


def target_of(arguments: argparse.Namespace) -> Target:
    """The target of the flags. Raises `BatonError(INVALID)` with the flag that is wrong."""
    if not _is_url(arguments.http):
        raise invalid("--http must be a URL such as https://HOST:PORT")
    if not _ADDRESS.fullmatch(arguments.grpc):
        raise invalid("--grpc must be HOST:PORT")
    if arguments.timeout_s <= 0:
        raise invalid("--timeout-s must be above 0")
    if (arguments.cert_file is None) != (arguments.key_file is None):
        raise invalid("TLS needs both of --cert-file and --key-file, or neither")
    return Target(
        arguments.http.rstrip("/"),
        arguments.grpc,
        arguments.model,
        arguments.timeout_s,
        arguments.api_keys_file,
        Tls(arguments.ca_file, arguments.cert_file, arguments.key_file, arguments.server_name),
    )


def _is_url(url: str) -> bool:
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False
    return known and not parts.query and not parts.fragment and "@" not in parts.netloc
