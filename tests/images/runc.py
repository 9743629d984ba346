"""Runs the rendered containers from built images with runc, as a kubelet asks a container runtime to."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.images.seccomp import runtime_default
from tests.manifests.container import HostRuntime
from tests.manifests.network import join_commands
from tests.manifests.runtime import Root

_SYSTEM_MOUNTS = (
    ("/proc", "proc", ()),
    ("/dev", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")),
    ("/dev/shm", "tmpfs", ("nosuid", "noexec", "nodev", "mode=1777", "size=65536k")),
    ("/dev/mqueue", "mqueue", ("nosuid", "noexec", "nodev")),
    ("/sys", "sysfs", ("nosuid", "noexec", "nodev", "ro")),
)
_MASKED = (
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/sys/firmware",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_CAPABILITIES = ("bounding", "effective", "inheritable", "permitted", "ambient")
_NAMESPACES = ("pid", "ipc", "uts", "mount")  # the network is the parent's


@dataclass(frozen=True)
class Image:
    """An image whose files are in the folder `root`."""

    root: str
    variables: Mapping[str, str]
    workdir: str


class ImageRuntime:
    """Runs containers of the images that were built, by the name of the image's repository; others, such as
    Valkey's, from this machine's files. `state`: an empty folder for runc."""

    def __init__(self, images: Mapping[str, Image], state: Path) -> None:
        self._images = images
        self._state = state
        self._others = HostRuntime()
        self._id = secrets.token_hex(4)

    def image(self, reference: str) -> Image | None:
        """The built image that a manifest names; None: it is none of ours."""
        return self._images.get(re.split("[:@]", reference.rpartition("/")[2])[0])

    def variables(self, image: str) -> dict[str, str]:
        built = self.image(image)
        return self._others.variables(image) if built is None else dict(built.variables)

    def start_command(self, root: Root, command: Sequence[str]) -> list[str]:
        image = self.image(root.container.image)
        if image is None:
            return self._others.start_command(root, command)
        bundle = _bundle(root)
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(config(image, root, command)))
        (bundle / "resolv.conf").touch()
        (bundle / "pid").unlink(missing_ok=True)
        script = bundle / "start.sh"
        script.write_text("\n".join(self._script(root)) + "\n")
        return ["unshare", "--net", "sh", "-e", str(script)]

    def _script(self, root: Root) -> Iterator[str]:
        if root.address is not None:
            yield from join_commands(root.address)
        bundle = _bundle(root)
        run = ["run", "--bundle", str(bundle), "--pid-file", str(bundle / "pid"), self._name(root)]
        yield f"exec {shlex.join([*self._runc(), *run])}"

    def inner_pid(self, root: Root, outer: int) -> int | None:
        if self.image(root.container.image) is None:
            return self._others.inner_pid(root, outer)
        written = _bundle(root) / "pid"
        pid = int(written.read_text() or 0) if written.exists() else 0
        return pid if pid and os.path.exists(f"/proc/{pid}") else None

    def exec_command(self, root: Root, pid: int, command: Sequence[str]) -> list[str]:
        if self.image(root.container.image) is None:
            return self._others.exec_command(root, pid, command)
        return [*self._runc(), "exec", self._name(root), *command]

    def own(self, folder: Path, fs_group: int) -> None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 0, fs_group, follow_symlinks=False)

    def remove(self, root: Root) -> None:
        if self.image(root.container.image) is not None:
            subprocess.run([*self._runc(), "delete", "--force", self._name(root)], check=True, timeout=60)

    def _runc(self) -> list[str]:
        return ["runc", "--root", str(self._state)]

    def _name(self, root: Root) -> str:
        return f"baton-{self._id}-{root.hostname}-{root.container.name}"


def config(image: Image, root: Root, command: Sequence[str]) -> dict[str, Any]:
    """The configuration of an OCI runtime for the security context that `tests.manifests.manifests` demands
    of the chart: a user without capabilities or new privileges, a read-only root, RuntimeDefault; and for its
    limit of memory."""
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": root.user, "gid": root.group, "additionalGids": [root.fs_group]},
            "args": [*command],
            "env": [f"{name}={value}" for name, value in root.variables.items()],
            "cwd": image.workdir,
            "capabilities": {kind: [] for kind in _CAPABILITIES},
            "noNewPrivileges": True,
        },
        "root": {"path": image.root, "readonly": True},
        "hostname": root.hostname,
        "mounts": [*_mounts(root)],
        "linux": {
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
                "memory": {"limit": root.container.memory_limit},
            },
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
            "seccomp": runtime_default(),
        },
    }


def _mounts(root: Root) -> Iterator[dict[str, Any]]:
    own = {mount.path for mount in root.container.mounts}
    for path, kind, options in _SYSTEM_MOUNTS:
        if path not in own:
            yield {"destination": path, "type": kind, "source": kind, "options": list(options)}
    yield _bound(root.folder / "hosts", "/etc/hosts", read_only=False)
    yield _bound(_bundle(root) / "resolv.conf", "/etc/resolv.conf", read_only=False)
    for mount in sorted(root.container.mounts, key=lambda one: len(one.path)):
        read_only = mount.read_only or mount.volume not in root.writable
        yield _bound(root.volumes / mount.volume, mount.path, read_only=read_only)


def _bound(source: Path, path: str, *, read_only: bool) -> dict[str, Any]:
    options = ["rbind", "rprivate", "ro" if read_only else "rw"]
    return {"destination": path, "type": "bind", "source": str(source), "options": options}


def _bundle(root: Root) -> Path:
    return root.folder / f"bundle-{root.container.name}"


def write_images(file: Path, images: Mapping[str, Image]) -> None:
    """Writes images for the process that runs them."""
    file.write_text(json.dumps({name: asdict(image) for name, image in images.items()}))


def read_images(file: Path) -> dict[str, Image]:
    """Reads the file that `write_images` wrote."""
    return {name: Image(**fields) for name, fields in json.loads(file.read_text()).items()}
