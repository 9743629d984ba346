"""The folder of a downloaded model: whether it is complete, and whether its files are the hub's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.base.errors import BatonError, ErrorKind
from services.common.config.settings_tree.settings import ModelSource

MANIFEST = ".baton-model.json"
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it. `digest` is hexadecimal: SHA-256 of a large file, else git's SHA-1 of a
    blob."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class HubFiles:
    """The files to download, of one commit."""

    commit: str
    files: tuple[HubFile, ...]


def is_complete(folder: Path, source: ModelSource) -> bool:
    """True if the folder has all that `source` names, by its manifest. A folder without one was not made by
    this command; it is complete if it has the files without which no router or worker starts."""
    manifest = _manifest(folder)
    if manifest is None:
        needed = [folder / "config.json", folder / "tokenizer.json"]
        weights = source.files == "tokenizer" or any(folder.glob("*.safetensors"))
        return weights and all(path.is_file() for path in needed)
    if manifest.get("source") != _named(source):
        return False
    sizes = manifest.get("files", {})
    return all(_size(folder / name) == size for name, size in sizes.items())


def has_manifest(folder: Path) -> bool:
    """True if `write_manifest` has been called for the folder."""
    return _manifest(folder) is not None


def write_manifest(folder: Path, source: ModelSource, files: HubFiles) -> None:
    """Records what the folder has, after `verify`."""
    sizes = {one.name: one.size for one in files.files}
    document = {"source": _named(source), "commit": files.commit, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1), encoding="utf-8")


def verify(folder: Path, files: Sequence[HubFile]) -> None:
    """Compares sizes and digests with the hub's. Deletes a file that differs, so that the next call downloads
    it again, and raises `BatonError(UNAVAILABLE)`."""
    for one in files:
        path = folder / one.name
        if _size(path) != one.size or _digest(path, one) != one.digest:
            path.unlink(missing_ok=True)
            message = f"{one.name} is not what the hub lists: it will be downloaded again at the next start"
            raise BatonError(ErrorKind.UNAVAILABLE, message)


def _digest(path: Path, file: HubFile) -> str:
    """The file's digest, of the kind that the hub lists."""
    if len(file.digest) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with open(path, "rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _named(source: ModelSource) -> dict[str, str]:
    return {"hub_id": source.hub_id, "revision": source.revision, "files": source.files}


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
