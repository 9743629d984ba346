"""Parts of a container, and the operations of a runtime on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.manifests.manifests import Container


@dataclass(frozen=True)
class Root:
    """One container of a pod. `folder`, which is the pod's, has the file `hosts`; `volumes` has a folder for
    each volume, of which only those in `writable` may be changed; `address`: None: it has no network; `user`,
    `group`: the ids that its processes have; `fs_group`: the further group, which owns files of volumes;
    `variables`: those of its image and manifest."""

    folder: Path
    container: Container
    volumes: Path
    writable: Collection[str]
    hostname: str
    address: str | None
    user: int
    group: int
    fs_group: int
    variables: Mapping[str, str]


class Runtime(Protocol):
    """Runs containers of the rendered pods."""

    def variables(self, image: str) -> dict[str, str]:
        """Variables that an image sets."""

    def start_command(self, root: Root, command: Sequence[str]) -> list[str]:
        """Runs `command` as process 1 of a new container. The process started is its parent, which has the
        container's network and ends with its exit code."""

    def inner_pid(self, root: Root, outer: int) -> int | None:
        """This machine's pid of process 1, whose parent is `outer`; None: not yet, or no more."""

    def exec_command(self, root: Root, pid: int, command: Sequence[str]) -> list[str]:
        """Runs a further command in the container of process 1."""

    def own(self, folder: Path, fs_group: int) -> None:
        """Gives the files of a volume to a group."""

    def remove(self, root: Root) -> None:
        """Ends a container whose parent's end would not, and removes what is left of it."""
