"""Runs containers from this machine's files: namespaces of their own, a read-only root, no capabilities."""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.manifests.network import join_commands
from tests.manifests.runtime import Root

REPOSITORY = Path(__file__).parents[2]
# Folders of the host that a container does not see.
_HIDDEN = ("boot", "etc", "lost+found", "media", "mnt", "proc", "run", "srv", "tmp", "var")
_ETC = ("passwd", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "ssl", "alternatives")
# Among them `valkey-server`, the command of the bundled Valkey's image.
_STAND_INS = Path("/image")
_LOCKED = re.compile(r"\b(nosuid|nodev|noexec)\b")


class HostRuntime:
    """Shows each container this machine's programs and this checkout in place of its image."""

    def variables(self, image: str) -> dict[str, str]:
        return environment(image)

    def start_command(self, root: Root, command: Sequence[str]) -> list[str]:
        script = root.folder / f"start-{root.container.name}.sh"
        script.write_text("\n".join(_script(root, command)) + "\n")
        new = ("--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--kill-child")
        return ["unshare", *new, "sh", "-e", str(script)]

    def inner_pid(self, root: Root, outer: int) -> int | None:
        return inner_pid(outer)

    def exec_command(self, root: Root, pid: int, command: Sequence[str]) -> list[str]:
        entered = ("--user", "--mount", "--pid", "--uts", "--ipc", "--net", "--preserve-credentials")
        return ["nsenter", "--target", str(pid), *entered, "--", *command]

    def own(self, folder: Path, fs_group: int) -> None:
        """Files of volumes are this process's, as whom the container runs."""

    def remove(self, root: Root) -> None:
        """The kernel ends all processes of a container with their parent."""


def _script(made: Root, command: Sequence[str]) -> Iterator[str]:
    root = made.folder / f"root-{made.container.name}"
    root.mkdir(exist_ok=True)
    yield f"mount -t tmpfs root {root}"
    for name in sorted(os.listdir("/")):
        if name not in _HIDDEN:
            yield from _shown(root, Path("/") / name)
    yield f"mkdir -p {root}/proc {root}/etc {root}/tmp {root}/run {root}/var {root}{_STAND_INS}"
    for name in _ETC:
        yield f"if [ -e /etc/{name} ]; then cp -r /etc/{name} {root}/etc/; fi"
    yield f"touch {root}/etc/hosts; mount --bind {made.folder}/hosts {root}/etc/hosts"
    yield f"echo 'hosts: files' > {root}/etc/nsswitch.conf"
    yield f"mount -t proc proc {root}/proc"
    for mount in sorted(made.container.mounts, key=lambda one: len(one.path)):
        yield from _mounted(made, root, mount.volume, mount.path, read_only=mount.read_only)
    # A checkout or an interpreter in a hidden folder, such as /tmp.
    interpreters = {Path(sys.prefix), Path(sys.base_prefix)}
    for path in (REPOSITORY, *(one for one in interpreters if not one.is_relative_to(REPOSITORY))):
        if path.parts[1] in _HIDDEN:
            yield from _shown(root, path)
    stand_in = Path(__file__).with_name("valkey_server.py")
    (made.folder / "valkey-server").write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    yield f"install {made.folder}/valkey-server {root}{_STAND_INS}/"
    yield f"hostname {made.hostname}"
    if made.address is not None:
        yield from join_commands(made.address)
    yield f"cd {root}; mkdir old; pivot_root . old; umount -l /old; rmdir /old"
    yield "mount -o remount,ro /; cd /tmp"
    identity = f"--map-user={made.user} --map-group={made.group}"
    yield f"exec unshare --user {identity} setpriv --no-new-privs {shlex.join(command)}"


def _mounted(made: Root, root: Path, volume: str, path: str, *, read_only: bool) -> Iterator[str]:
    target = f"{root}{path}"
    yield f"mkdir -p {target}; mount --bind {made.volumes}/{volume} {target}"
    if read_only or volume not in made.writable:
        yield f"mount -o remount,bind,ro {target}"


def _shown(root: Path, path: Path) -> Iterator[str]:
    """A folder of the host at the same place, not writable."""
    target = f"{root}{path}"
    if path.is_symlink():
        yield f"cp -P {path} {target}"
    elif path.is_dir():
        yield f"mkdir -p {target}; mount --rbind {path} {target}"
        yield f"mount -o remount,bind,ro{_locked_options(path)} {target}"


def _locked_options(path: Path) -> str:
    """Options of the host's mount that a user namespace may not take away."""
    found = ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, _, _, place, options, *_ = line.split()
        if path.is_relative_to(place.replace("\\040", " ")):
            found = "".join(f",{option}" for option in _LOCKED.findall(options))
    return found


def environment(image: str) -> dict[str, str]:
    """The variables that an image sets, its PATH apart."""
    found = {"PATH": f"{_STAND_INS}:{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    found["PYTHONPATH"] = str(REPOSITORY)
    for name in ("router", "worker"):
        if f"baton-{name}:" in image:
            return dockerfile_variables(name) | found
    assert "/valkey:" in image, f"an unknown image {image}"
    return found


@functools.cache
def dockerfile_variables(name: str) -> dict[str, str]:
    """The variables that ENV sets in the last stage."""
    text = (REPOSITORY / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
    stage = text.rpartition("\nFROM ")[2].replace("\\\n", " ")
    words = [word for line in re.findall(r"^ENV (.*)$", stage, re.M) for word in line.split()]
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def inner_pid(outer: int) -> int | None:
    """The process 1 of a container, by the process that was started for it; None: not yet, or no more."""
    try:
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None
