"""Writes the packages of the images, with versions and hashes, as pip finds them for this machine's Python.

    python -m deploy.docker.lock            writes requirements-{router,worker,build}.txt; run on Linux x86-64
                                            with the Python of the images (3.11)

Versions are those of constraints.txt where it has them.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PYTHON = (3, 11)

# What pip resolves for each image. "===" is for the wheel with CUDA, not one such as 2.13.0+cpu.
IMAGES: dict[str, tuple[str, ...]] = {
    "router": (f"{ROOT}[router,hub,otel]",),
    "worker": (f"{ROOT}[worker,hub,cluster,otel]", "torch===2.13.0"),
    "build": ("setuptools>=68", "wheel"),
}


def lock(requirements: tuple[str, ...]) -> str:
    """The text of a requirements file with hashes; the project itself is not in it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-P", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary", ":all:", "--report", report.name, "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*command, *requirements], check=True)
        found = json.loads(Path(report.name).read_text(encoding="utf-8"))["install"]
    locked = sorted(_line(package) for package in found if not package.get("is_direct"))
    return "# Written by deploy/docker/lock.py.\n" + "".join(locked)


def _line(package: dict[str, Any]) -> str:
    metadata = package["metadata"]
    digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{metadata['name'].lower()}=={metadata['version']} --hash=sha256:{digest}\n"


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
