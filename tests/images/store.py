"""A store of images of its own, in which buildah builds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.images.missing import CERTIFICATES
from tests.images.runc import Image

ROOT = Path(__file__).parents[2]
# What python:3.11-slim-bookworm has of its own; its Python is newer.
_PACKAGES = ("ca-certificates", "python3", "python3-venv", "python-is-python3")
_MIRROR = "http://deb.debian.org/debian"
_BUILD_S, _ASK_S = 2400, 300
_SHOWN = 4000


class Store:
    """Images in `folder`, which is made, and which `remove` takes away. vfs needs nothing of the kernel; it
    copies an image for each that is built on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        accept = {"default": [{"type": "insecureAcceptAnything"}]}  # nothing is pulled
        (folder / "policy.json").write_text(json.dumps(accept))
        (folder / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n")

    def make_base(self) -> str:
        """Makes the base of Debian's packages; its digest."""
        context = self._folder / "base"
        context.mkdir()
        packages = f"--include={','.join(_PACKAGES)}"
        made = ["bookworm", f"{context}/base.tar", _MIRROR]
        _run(["mmdebstrap", "--quiet", "--variant=minbase", packages, *made])
        (context / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        self._build("base", context / "Dockerfile", context)
        shutil.rmtree(context)
        return self._buildah("images", "--digests", "--format", "{{.Digest}}", _tag("base")).strip()

    def build(
        self, name: str, digest: str, arguments: Mapping[str, str] = {}, contexts: Mapping[str, Path] = {}
    ) -> None:
        """Builds an image of its Dockerfile on the base. This machine's authorities are those of the build,
        which may reach packages through a proxy of theirs."""
        given = {"PYTHON_IMAGE": _tag("base"), "PYTHON_DIGEST": digest, **arguments}
        options = ["--network", "host", "-v", f"{self._folder}/pip.conf:/etc/pip.conf:ro"]
        options += ["-v", f"{CERTIFICATES.parent}:{CERTIFICATES.parent}:ro"]
        options += [f"--build-arg={key}={value}" for key, value in given.items()]
        options += [f"--build-context={key}={path}" for key, path in contexts.items()]
        file = ROOT / "deploy" / "docker" / f"{name}.Dockerfile"
        self._build(name, file, ROOT, *options)

    def _build(self, name: str, file: Path, context: Path, *options: str) -> None:
        """Builds an image in one layer above its base."""
        policy = f"--signature-policy={self._folder}/policy.json"
        named = ["--tag", _tag(name), "--file", str(file), str(context)]
        self._buildah("bud", policy, "--pull-never", "--layers=false", *options, *named, within_s=_BUILD_S)

    def bytes_of(self, name: str) -> int:
        """The size of an image, its base included, before compression."""
        manifest = json.loads(self._inspected(name)["Manifest"])
        return sum(layer["size"] for layer in manifest["layers"])

    def unpacked(self, name: str) -> Image:
        """The files of an image, and what it sets."""
        stated = self._inspected(name)["OCIv1"]["config"]
        container = self._buildah("from", "--pull-never", _tag(name)).strip()
        folder = self._buildah("mount", container).strip()
        variables = dict(line.split("=", 1) for line in stated["Env"])
        return Image(folder, variables, stated["WorkingDir"])

    def _inspected(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._buildah("inspect", "--type", "image", _tag(name)))
        return found

    def disk_bytes(self) -> int:
        """Disk space that the store takes."""
        return int(_run(["du", "-s", "--block-size=1", str(self._folder)]).split()[0])

    def remove(self) -> None:
        """Removes all that the store has."""
        self._buildah("umount", "--all")
        self._buildah("rm", "--all")
        shutil.rmtree(self._folder)

    def _buildah(self, *arguments: str, within_s: float = _ASK_S) -> str:
        where = ["--root", str(self._folder / "root"), "--runroot", str(self._folder / "run")]
        return _run(["buildah", *where, "--storage-driver", "vfs", *arguments], within_s)


def _tag(name: str) -> str:
    return f"localhost/baton-{name}"


def _run(command: Sequence[str], within_s: float = _BUILD_S) -> str:
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr)[-_SHOWN:]}"
    return done.stdout
