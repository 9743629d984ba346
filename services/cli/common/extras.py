"""Checks that the optional dependencies (extras) that a command needs are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

from baton.base.errors import BatonError, ErrorKind

DISTRIBUTION = "baton-serve"
# The extra that includes all others.
EVERYTHING = "serve"


def require(*extras: str, hint: str = "") -> None:
    """Checks that every package of these extras is installed.

    Raises `BatonError(INVALID)` with one line that names the missing packages and how to install them, and
    ends with `hint`. Nothing is checked where Baton itself is not installed, as in a checkout on PYTHONPATH.
    """
    try:
        missing = sorted({name for extra in extras for name in _packages_of(extra) if not installed(name)})
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
    """The distributions of an extra, including those of extras that it includes."""
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


def installed(name: str) -> bool:
    """True if the distribution of that name is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
