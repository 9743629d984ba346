"""The version of a release, which the package and the chart state. Images have it as their tag.

python -m deploy.release.version             prints it; exit code 2 where the files disagree
python -m deploy.release.version 1.2.3       exit code 2 where it is not this one
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.release.errors import ReleaseError, exit_code

ROOT = Path(__file__).parents[2]
# Both PEP 440 and SemVer read it the same way.
FORM = re.compile(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}")
# Where it is stated: file, and what precedes and follows it in its line.
_PLACES = (
    ("pyproject.toml", 'version = "', '"'),
    ("deploy/helm/baton/Chart.yaml", "version: ", ""),
    ("deploy/helm/baton/Chart.yaml", 'appVersion: "', '"'),
)


def checked(version: str) -> str:
    """The version itself. Raises ReleaseError unless it is three numbers with dots."""
    if not FORM.fullmatch(version):
        raise ReleaseError(f"{version!r} is not a version such as 1.2.3")
    return version


def stated(root: Path = ROOT) -> str:
    """The version that all files state. Raises ReleaseError where they disagree, or one has none."""
    found = {}
    for file, before, after in _PLACES:
        (match,) = _matches(root / file, before, after)
        found[f"{file}: {before.strip()}"] = match[1]
    if len(set(found.values())) != 1:
        raise ReleaseError("versions differ: " + "; ".join(f"{place} {one}" for place, one in found.items()))
    return next(iter(found.values()))


def set_version(version: str, root: Path = ROOT) -> None:
    """Writes the version wherever it is stated. Raises ReleaseError for one that is none."""
    checked(version)
    for file, before, after in _PLACES:
        (match,) = _matches(root / file, before, after)
        text = match.string
        changed = text[: match.start(1)] + version + text[match.end(1) :]
        if changed != text:
            (root / file).write_text(changed, encoding="utf-8")


def _matches(file: Path, before: str, after: str) -> list[re.Match[str]]:
    """The one place of the version in a file. Raises ReleaseError where there is none, or several."""
    pattern = rf"^{re.escape(before)}([^\"\n]+){re.escape(after)}$"
    found = list(re.finditer(pattern, file.read_text(encoding="utf-8"), re.MULTILINE))
    if len(found) != 1:
        raise ReleaseError(f"{file}: {len(found)} lines begin with {before.strip()!r}; there must be one")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the version, or compares it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release.version", description=__doc__)
    parser.add_argument("version", nargs="?", help="the version that it should be")
    wanted = parser.parse_args(argv).version

    def work() -> None:
        found = stated()
        if wanted is not None and checked(wanted) != found:
            raise ReleaseError(
                f"the files state {found}, not {wanted}; make release VERSION={wanted} sets it"
            )
        print(found)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
