"""Volumes of a pod: empty folders, and files of ConfigMaps and Secrets as the kubelet lays them out."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.manifests.fields import Fields

Kind = Literal["configMap", "secret"]
Store = Mapping[tuple[Kind, str], Mapping[str, str]]
"""What the API server has: the data of each ConfigMap and Secret."""

_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class Source:
    """Keys of one object, and the files they become; None: every key, by its own name."""

    kind: Kind
    name: str
    files: Mapping[str, str] | None
    optional: bool


@dataclass(frozen=True)
class EmptyDir:
    size: int


@dataclass(frozen=True)
class ObjectFiles:
    sources: tuple[Source, ...]
    mode: int

    def contents(self, store: Store) -> dict[str, str]:
        """The files by name. A missing object or key is an error, as it is for a kubelet."""
        found = {}
        for source in self.sources:
            data = store.get((source.kind, source.name))
            if data is None and source.optional:
                continue
            assert data is not None, f"no {source.kind} {source.name}"
            files = source.files or {key: key for key in data}
            for key, file in files.items():
                if key not in data and source.optional:
                    continue
                assert key in data, f"{source.kind} {source.name} has no key {key}"
                found[file] = data[key]
        return found


Volume = EmptyDir | ObjectFiles


def read_volume(fields: Fields) -> tuple[str, Volume]:
    with fields as volume:
        name = volume.take("name")
        empty = volume.take("emptyDir", None)
        if empty is not None:
            with Fields(empty, name) as folder:
                folder.expect("medium", "Memory")
                return name, EmptyDir(bytes_of(folder.take("sizeLimit")))
        projected = volume.take("projected", None)
        if projected is not None:
            with Fields(projected, name) as all_of_it:
                mode = all_of_it.take("defaultMode", 0o644)
                sources = [_only_source(source) for source in all_of_it.sections("sources")]
                return name, ObjectFiles(tuple(sources), mode)
        source, mode = _source(volume)
        return name, ObjectFiles((source,), mode)


def _only_source(fields: Fields) -> Source:
    with fields as projected:
        return _source(projected)[0]


def _source(fields: Fields) -> tuple[Source, int]:
    """A ConfigMap or Secret and the mode of its files."""
    with fields.section("configMap") as config:
        if name := config.take("name", ""):
            return Source("configMap", name, _items(config), False), config.take("defaultMode", 0o644)
    with fields.section("secret") as secret:
        # A volume and a source of a projected one spell it differently.
        name = secret.take("secretName", None) or secret.take("name")
        source = Source("secret", name, _items(secret), secret.take("optional", False))
        return source, secret.take("defaultMode", 0o644)


def _items(fields: Fields) -> dict[str, str] | None:
    items = {}
    for item in fields.sections("items"):
        with item:
            items[item.take("key")] = item.take("path")
    return items or None


def mount_empty(folder: Path, volume: EmptyDir) -> None:
    """Makes the folder, which holds no more than its limit."""
    folder.mkdir(parents=True)
    options = f"size={volume.size},mode=0777"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "empty", str(folder)], check=True, timeout=30)


def unmount(folder: Path) -> None:
    """Takes away what `mount_empty` made, if it is there."""
    subprocess.run(["umount", "-l", str(folder)], check=False, timeout=30, stderr=subprocess.DEVNULL)


def bytes_of(quantity: str) -> int:
    """The number of bytes of a quantity such as `512Mi`."""
    number = quantity.rstrip("KMGi")
    return int(number) * _UNITS[quantity[len(number) :]]


def write_files(folder: Path, volume: ObjectFiles, store: Store) -> None:
    """Writes the files of a volume, or replaces all of them at once as the kubelet does after a change: each
    is a link into a folder, and the link to that folder is what changes."""
    folder.mkdir(parents=True, exist_ok=True)
    version = next(one for n in itertools.count() if not (one := folder / f"..{n}").exists())
    version.mkdir()
    contents = volume.contents(store)
    for name, text in contents.items():
        file = version / name
        file.write_text(text)
        file.chmod(volume.mode)
    new = folder / "..new"
    new.symlink_to(version.name)
    new.rename(folder / "..data")
    for name in contents:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(f"..data/{name}")
