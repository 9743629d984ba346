"""`baton ray certificate`: makes the certificate of a Ray node, whose peers verify its address."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from services.cli.common import extras
from services.common.config.settings_tree.reader import invalid

# Ray's processes of a node also call each other by these.
_LOOPBACK = ("127.0.0.1", "localhost")
_KEY_MODE = 0o600


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--authority",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with an authority's tls.crt, tls.key",
    )
    parser.add_argument(
        "--host",
        action="append",
        required=True,
        dest="hosts",
        metavar="ADDRESS",
        help="address or name of this node; may be given several times",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for tls.crt, tls.key and ca.crt"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the files. Raises `BatonError(INVALID)` with one line where the authority cannot be used."""
    extras.require("cluster")
    from baton.tls.issue import issue_certificate  # needs a package of the extra

    try:
        authority = (arguments.authority / "tls.crt").read_bytes()
        key = (arguments.authority / "tls.key").read_bytes()
        issued = issue_certificate(authority, key, [*arguments.hosts, *_LOOPBACK])
        _write(arguments.out / "tls.key", issued.key, _KEY_MODE)
        _write(arguments.out / "tls.crt", issued.chain, 0o644)
        _write(arguments.out / "ca.crt", authority, 0o644)
    except OSError as error:
        raise invalid(f"{error.filename}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise invalid(f"--authority {arguments.authority}: {error}") from None
    return 0


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file that is created with its final mode, so that others can never read a key."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
