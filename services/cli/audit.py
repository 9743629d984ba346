"""`baton audit verify`: checks that no line of a router's audit log was changed, removed or inserted."""

from __future__ import annotations

import argparse
from pathlib import Path

from services.common.observability.audit_chain import verify


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="files that continue each other, oldest first"
    )


def run(arguments: argparse.Namespace) -> int:
    """Verifies an audit log. Raises BatonError(INVALID), which names the first line that breaks the chain."""
    found = verify(arguments.files)
    print(f"lines {found.first_line} to {found.last_line}, {found.dropped} dropped, last hash {found.hash}")
    return 0
