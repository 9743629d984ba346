"""Writes the packages of the images, with versions and hashes, as pip finds them for this machine's Python.

    python -m deploy.docker.lock            writes requirements-{router,worker,worker-cpu,build}.txt

Run it on Linux x86-64 with the Python of the images (3.11), where pip finds torch's CPU wheel too
(PIP_FIND_LINKS=DIR or PIP_EXTRA_INDEX_URL=URL). Versions are those of constraints.txt where it has them. What
only the first releases of Python 3.11 need (Debian 12 has 3.11.2) is locked under its marker.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PYTHON = (3, 11)
FIRST_RELEASE = "3.11.0"

# What pip resolves for each image. "===" is for the wheel with CUDA, not one such as 2.13.0+cpu. The CPU
# wheel asks for no Triton, and gets that of the wheel with CUDA.
IMAGES: dict[str, tuple[str, ...]] = {
    "router": (f"{ROOT}[router,hub,otel]",),
    "worker": (f"{ROOT}[worker,hub,cluster,otel]", "torch===2.13.0"),
    "worker-cpu": (f"{ROOT}[worker,hub,cluster,otel]", "torch===2.13.0+cpu", "triton==3.7.1"),
    "build": ("setuptools>=68", "wheel"),
}

Package = dict[str, Any]


def lock(requirements: Sequence[str]) -> str:
    """The text of a requirements file with hashes; the project itself is not in it."""
    found = resolve(requirements)
    lines = [_line(package) for package in found if not package.get("is_direct")]
    for name, marker in needs_of_first_release(found).items():
        lines += [_line(package, marker) for package in resolve([name], "--no-deps")]
    return "# Written by deploy/docker/lock.py.\n" + "".join(sorted(lines))


def resolve(requirements: Sequence[str], *options: str) -> list[Package]:
    """Returns the packages that pip would install, as its report describes them. Raises CalledProcessError
    where there are none."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-P", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary", ":all:", "--report", report.name, "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*command, *options, *requirements], check=True)
        found: list[Package] = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
    return found


def needs_of_first_release(found: Sequence[Package]) -> dict[str, Marker]:
    """Requirements, with their markers, that packages have under the first release of 3.11 and not under this
    one.
    """
    needs: dict[str, Marker] = {}
    for line in (line for package in found for line in package["metadata"].get("requires_dist", ())):
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            continue
        if marker.evaluate({"extra": "", "python_full_version": FIRST_RELEASE}):
            needs[f"{requirement.name}{requirement.specifier}"] = marker
    return needs


def _line(package: Package, marker: Marker | None = None) -> str:
    metadata = package["metadata"]
    digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
    condition = f" ; {marker}" if marker else ""
    return f"{metadata['name'].lower()}=={metadata['version']}{condition} --hash=sha256:{digest}\n"


def main() -> int:
    """Writes all files; the exit code."""
    if sys.version_info[:2] != PYTHON or platform.machine() != "x86_64":
        print(f"lock with Python {'.'.join(map(str, PYTHON))} on x86_64, that of the images", file=sys.stderr)
        return 1
    for image, requirements in IMAGES.items():
        (FOLDER / f"requirements-{image}.txt").write_text(lock(requirements), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
