"""Artifacts of a release besides images: wheel, sdist, packaged chart, bills of materials (CycloneDX),
checksums. Each is built from the files that git tracks.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import yaml

from deploy.release.errors import ReleaseError

SUMS = "SHA256SUMS"
_TIMEOUT_S = 900


def distributions(source: Path, out: Path, time: str) -> list[Path]:
    """The sdist, and the wheel that is built from it."""
    _run([sys.executable, "-P", "-m", "build", "--outdir", str(out), str(source)], time)
    return sorted(out.glob("baton_serve-*"))


def chart(source: Path, out: Path) -> Path:
    """The chart, packaged by Helm."""
    import helm_python

    try:
        made = helm_python.package(source / "deploy" / "helm" / "baton", destination=out)
    except helm_python.HelmError as error:
        raise ReleaseError(f"chart: {error}") from None
    return Path(made)


def bill_of_materials(source: Path, image: str, version: str, out: Path, time: str) -> Path:
    """Writes the packages that pip installs into an image, with hashes, as CycloneDX JSON. The image's own
    attestation has the packages of its base too.
    """
    file = out / f"baton-{image}-{version}.cdx.json"
    locked = source / "deploy" / "docker" / f"requirements-{image}.txt"
    command = [
        sys.executable,
        "-P",
        "-m",
        "cyclonedx_py",
        "requirements",
        str(locked),
        "--output-reproducible",
    ]
    command += ["--pyproject", str(source / "pyproject.toml"), "--sv", "1.6", "--of", "JSON", "-o", str(file)]
    _run(command, time)
    return file


def sums(out: Path) -> None:
    """Writes the SHA-256 of each file, as `sha256sum --check` reads it."""
    lines = []
    for file in sorted(path for path in out.iterdir() if path.is_file() and path.name != SUMS):
        with file.open("rb") as opened:
            lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n")
    (out / SUMS).write_text("".join(lines), encoding="utf-8")


def versions(out: Path) -> dict[str, str]:
    """The version that each wheel, sdist, chart and list in a folder states inside, by file name."""
    found: dict[str, str] = {}
    for file in sorted(out.iterdir()):
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
                found[file.name] = _metadata_version(wheel.read(name).decode())
        elif file.name.endswith(".tar.gz"):
            name = f"{file.name.removesuffix('.tar.gz')}/PKG-INFO"
            found[file.name] = _metadata_version(_member(file, name).decode())
        elif file.suffix == ".tgz":
            stated = yaml.safe_load(_member(file, "baton/Chart.yaml"))
            found[file.name] = stated["version"]
            found[f"{file.name}: appVersion"] = stated["appVersion"]
        elif file.name.endswith(".cdx.json"):
            found[file.name] = json.loads(file.read_text(encoding="utf-8"))["metadata"]["component"][
                "version"
            ]
    return found


def _metadata_version(text: str) -> str:
    return str(Parser().parsestr(text, headersonly=True)["Version"])


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as opened:
        member = opened.extractfile(name)
        assert member is not None, f"{archive.name}: {name} is no file"
        return member.read()


def _run(command: list[str], time: str) -> None:
    environment = dict(os.environ) | {"SOURCE_DATE_EPOCH": time}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        what = " ".join(command[1:4])
        raise ReleaseError(f"{what}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
