"""Builds the images of router and worker: into archives in a folder, or into a registry.

    make images                             dist/baton-{router,worker}-VERSION.oci.tar
    make images ARGS='--push ghcr.io/you'   ghcr.io/you/baton-{router,worker}:VERSION
    make images ARGS='--kernels DIR'        with kernels that `baton model compile --out DIR` compiled

Needs docker with buildx and a builder of its own (docker buildx create --use), since the one that is built in
writes no attestations. PYTHON_DIGEST=sha256:… names the base image; without it the one that its tag has now
is taken, and printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.release import git
from deploy.release.errors import ReleaseError, exit_code
from deploy.release.version import ROOT, stated

NAMES = ("router", "worker")
# The platform of the locked packages.
PLATFORM = "linux/amd64"
DIGESTS = "values-digests.yaml"
# Of a folder of compiled kernels: baton.device.kernel_files.manifest names it too.
MANIFEST = "baton-kernels.json"
DIST = ROOT / "dist"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BASE = re.compile(r"^ARG PYTHON_IMAGE=(\S+)$", re.MULTILINE)
_ASK_S, _BUILD_S = 120, 3 * 3600


@dataclass(frozen=True, slots=True)
class Build:
    """Settings that all images of a release share."""

    version: str
    out: Path
    push: str | None  # registry with the path before the image's name; None: archives in `out`
    base_digest: str
    root: Path = ROOT
    kernels: Path | None = None  # folder of compiled kernels for the workers' image


def need_builder() -> None:
    """Raises ReleaseError, which says what is missing, unless docker can build images with attestations."""
    if shutil.which("docker") is None:
        raise ReleaseError("images need docker with buildx, and docker is not installed")
    if _docker("buildx", "version").returncode:
        raise ReleaseError("images need docker's plugin buildx (`docker buildx version` fails)")
    inspected = _docker("buildx", "inspect")
    if inspected.returncode:
        raise ReleaseError(f"images need a builder that answers: {_last_line(inspected.stderr)}")
    if re.search(r"^Driver:\s+docker$", inspected.stdout, re.MULTILINE):
        raise ReleaseError(
            "images need a builder of their own, since docker's own writes no attestations: "
            "docker buildx create --use"
        )


def base_digest(environment: Mapping[str, str], root: Path = ROOT) -> str:
    """The digest of the base image: of PYTHON_DIGEST, or the one that the registry has for its tag. Raises
    ReleaseError where that is none.
    """
    bases = {_BASE.findall(dockerfile(name, root).read_text(encoding="utf-8"))[0] for name in NAMES}
    if len(bases) != 1:
        raise ReleaseError(f"the images have different bases: {', '.join(sorted(bases))}")
    (base,) = bases
    given = environment.get("PYTHON_DIGEST", "")
    if not given:
        asked = _docker("buildx", "imagetools", "inspect", base, "--format", "{{json .Manifest}}")
        if asked.returncode:
            raise ReleaseError(f"{base}: {_last_line(asked.stderr)}")
        given = str(json.loads(asked.stdout)["digest"])
    if not _DIGEST.fullmatch(given):
        raise ReleaseError(f"PYTHON_DIGEST: {given!r} is not a digest (sha256:…)")
    print(f"base: {base}@{given}", file=sys.stderr)
    return given


def dockerfile(name: str, root: Path = ROOT) -> Path:
    """The Dockerfile of an image."""
    return root / "deploy" / "docker" / f"{name}.Dockerfile"


def build_all(build: Build) -> dict[str, str]:
    """Builds both images and writes images.json; after a push also a values file with their digests, by which
    the chart pulls exactly these. Returns the digests by name. Raises ReleaseError where a build fails.
    """
    build.out.mkdir(parents=True, exist_ok=True)
    digests = {name: _build(build, name) for name in NAMES}
    facts = {
        name: {"image": _reference(build, name), "digest": digest, "base": build.base_digest}
        for name, digest in digests.items()
    }
    (build.out / "images.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if build.push:
        (build.out / DIGESTS).write_text(_values(build, digests), encoding="utf-8")
    return digests


def _build(build: Build, name: str) -> str:
    """Builds one image; its digest."""
    image = f"baton-{name}"
    facts = build.out / f"{image}-{build.version}.build.json"
    archive = build.out / f"{image}-{build.version}.oci.tar"
    command = ["docker", "buildx", "build", "--file", str(dockerfile(name, build.root))]
    command += ["--platform", PLATFORM, "--tag", _reference(build, name)]
    arguments = {
        "PYTHON_DIGEST": build.base_digest,
        "VERSION": build.version,
        "REVISION": git.revision(build.root),
    }
    if build.kernels is not None and name == "worker":
        command += ["--build-context", f"kernels={build.kernels.absolute()}"]
    for key, value in arguments.items():
        command += ["--build-arg", f"{key}={value}"]
    command += ["--provenance=mode=max", "--sbom=true", "--metadata-file", str(facts)]
    command += ["--push"] if build.push else ["--output", f"type=oci,dest={archive}"]
    environment = dict(os.environ) | {"SOURCE_DATE_EPOCH": git.commit_time(build.root)}
    done = subprocess.run([*command, str(build.root)], env=environment, timeout=_BUILD_S)
    if done.returncode:
        raise ReleaseError(f"{image}: docker buildx build ended with {done.returncode}")
    digest = str(json.loads(facts.read_text(encoding="utf-8"))["containerimage.digest"])
    facts.unlink()
    return digest


def _reference(build: Build, name: str) -> str:
    prefix = f"{build.push.rstrip('/')}/" if build.push else ""
    return f"{prefix}baton-{name}:{build.version}"


def _values(build: Build, digests: Mapping[str, str]) -> str:
    lines = [
        f"# The images of {build.version}, by digest.",
        "image:",
        f"  registry: {(build.push or '').rstrip('/')}",
    ]
    lines += [f'  {name}: {{tag: "{build.version}", digest: "{digest}"}}' for name, digest in digests.items()]
    return "\n".join(lines) + "\n"


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["docker", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S)
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{' '.join(command[:4])} did not answer within {_ASK_S} s") from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def check_kernels(folder: Path | None, version: str) -> None:
    """Raises ReleaseError where a folder of compiled kernels is not one of this version."""
    if folder is None:
        return
    try:
        stated = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["baton"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ReleaseError(f"{folder} was not made by baton model compile: no {MANIFEST}") from None
    if stated != version:
        raise ReleaseError(f"{folder} has kernels of Baton {stated}, and this is {version}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that images have."""
    parser.add_argument(
        "--push", metavar="REGISTRY", help="push to this registry instead of writing archives"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DIST,
        metavar="DIR",
        help="folder of what is built (default dist)",
    )
    parser.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="compiled kernels for the workers' image, by baton model compile",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the images of the version that the files state; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release.images", description=__doc__)
    add_flags(parser)
    arguments = parser.parse_args(argv)

    def work() -> None:
        version = stated()
        check_kernels(arguments.kernels, version)
        need_builder()
        digest = base_digest(os.environ)
        build = Build(version, arguments.out, arguments.push, digest, kernels=arguments.kernels)
        for name, digest in build_all(build).items():
            print(f"{_reference(build, name)} {digest}")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
