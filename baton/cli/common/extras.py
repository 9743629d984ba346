"""What `pip` must have installed beside the base package for a command to work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

from baton.errors import BatonError, ErrorKind

DISTRIBUTION = "baton-serve"
# `serve` has all of the others.
EVERYTHING = "serve"


def require(*extras: str, hint: str = "") -> None:
    """Checks that all that these extras list is installed.

    Raises `BatonError(INVALID)` with one line that names what is missing and how to install it, and ends with
    `hint`. Nothing is checked where Baton itself is not installed, as in a checkout on PYTHONPATH.
    """
    try:
        missing = sorted({name for extra in extras for name in _packages_of(extra) if not _installed(name)})
    except PackageNotFoundError:
        return
    if missing:
        wanted = extras[0] if len(extras) == 1 and not hint else EVERYTHING
        raise BatonError(
            ErrorKind.INVALID,
            f"this command needs packages that are not installed ({', '.join(missing)}): "
            f"pip install '{DISTRIBUTION}[{wanted}]'{hint}",
        )


def _packages_of(extra: str) -> Iterator[str]:
    """The distributions that an extra lists, and those of extras that it includes."""
    for requirement in requires(DISTRIBUTION) or ():
        wanted, _, marker = requirement.partition(";")
        if not re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            continue
        name, included = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[([^]]*)\])?.*", wanted).groups()  # type: ignore[union-attr]
        if _same(name, DISTRIBUTION):
            for other in (included or "").split(","):
                yield from _packages_of(other.strip())
        else:
            yield name


def _same(name: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", name).lower() == other


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
