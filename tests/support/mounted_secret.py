"""Files of a Secret as the kubelet mounts them: each is a link into a folder that is replaced as a whole."""

from __future__ import annotations

import itertools
from pathlib import Path


def mount_secret(folder: Path, **files: str) -> None:
    """Puts the files (`redis_url` becomes `redis-url`) into `folder`, in place of those of the last call."""
    version = next(one for n in itertools.count() if not (one := folder / f"..{n}").exists())
    version.mkdir()
    for name, content in files.items():
        (version / name.replace("_", "-")).write_text(content)
    new = folder / "..new"
    new.symlink_to(version.name)
    new.rename(folder / "..data")
    for name in files:
        link = folder / name.replace("_", "-")
        if not link.is_symlink():
            link.symlink_to(f"..data/{link.name}")
