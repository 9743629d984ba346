"""The sources of a release as git knows them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from deploy.release.errors import ReleaseError


def revision(root: Path) -> str:
    """The commit, with `-dirty` where files differ from it."""
    changed = _git(root, "status", "--porcelain")
    return _git(root, "rev-parse", "HEAD").strip() + ("-dirty" if changed else "")


def commit_time(root: Path) -> str:
    """Seconds since 1970 of the commit, which what is built bears in place of the time of the build."""
    return _git(root, "log", "-1", "--format=%ct").strip()


def export(root: Path, folder: Path) -> None:
    """Copies the files that git tracks, as they are now. What else lies in the tree is in no release."""
    for name in _git(root, "ls-files", "-z").split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        raise ReleaseError("git is not installed") from None
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout
