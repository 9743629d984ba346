"""Facts about processes from /proc: their mappings, open files and connections."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"
_INSTALLED = (Path(__file__).parents[3], Path(sys.prefix), Path(sys.base_prefix))
Inode = tuple[str, int]
"""(device, inode number)."""


def maps_library(pid: int, name: str) -> bool:
    """True if a process has a shared library of this name mapped."""
    return name in Path(f"/proc/{pid}/maps").read_text()


def writable_shared_maps(pid: int) -> set[Inode]:
    """Files, memfds and shared memory that the process maps such that another could see its writes."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, permissions, _, device, inode, *_ = line.split(maxsplit=5)
        if "s" in permissions and "w" in permissions and inode != "0":
            found.add((device, int(inode)))
    return found


def open_memory(pid: int) -> set[Inode]:
    """memfds and shared memory that the process holds a descriptor of."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(descriptor).startswith(("/memfd:", "/dev/shm/")):
                status = descriptor.stat()
                device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
                found.add((device, status.st_ino))
    return found


@dataclass(frozen=True)
class Socket:
    """A TCP socket of a process; every peer of these tests is on this host, so ports name both ends."""

    pid: int
    local_port: int
    remote_port: int
    listens: bool


def tcp_sockets(pids: Iterable[int]) -> list[Socket]:
    """Every TCP socket that one of the processes holds."""
    table = tcp_table()
    return [Socket(pid, *table[inode]) for pid in pids for inode in _socket_inodes(pid) if inode in table]


def tcp_table() -> dict[int, tuple[int, int, bool]]:
    """Every TCP socket of this host, by inode: local port, remote port, whether it listens."""
    table = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, remote, state, *_, inode = line.split()[:10]
            table[int(inode)] = (_port(local), _port(remote), state == LISTEN)
    return table


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _socket_inodes(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process may end meanwhile
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def left_in_file_systems(pids: Iterable[int]) -> set[str]:
    """Paths that these processes hold in temporary folders and in /dev/shm: files, folders, sockets; without
    the checkout and the interpreter, which may lie there, too."""
    places = (tempfile.gettempdir() + "/", "/tmp/", "/dev/shm/")
    found: set[str] = set()
    bound = _bound_sockets()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {line.split(maxsplit=5)[5] for line in _lines(f"/proc/{pid}/maps") if line.count("/")}
            found |= {os.readlink(f"/proc/{pid}/cwd")}
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.add(os.readlink(descriptor))
            found |= {bound[inode] for inode in _socket_inodes(pid) if inode in bound}
    named = {path for path in found if path.startswith(places) and not path.endswith("(deleted)")}
    named = {path for path in named if not any(Path(path).is_relative_to(root) for root in _INSTALLED)}
    return named | {str(Path(path).parent) for path in named if Path(path).parent not in map(Path, places)}


def _bound_sockets() -> dict[int, str]:
    """The paths of Unix sockets, by inode."""
    rows = (line.split() for line in _lines("/proc/net/unix")[1:])
    return {int(row[6]): row[7] for row in rows if len(row) > 7}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def occurrences(pid: int, needle: bytes) -> int:
    """The number of occurrences of `needle` in the memory of a process, its environment and arguments
    included."""
    found = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if "r" not in line.split()[1] or line.rstrip().endswith(("[vvar]", "[vsyscall]")):
                continue
            with contextlib.suppress(OSError):  # unmapped meanwhile, or of a device
                memory.seek(first)
                found += (memory.read(last - first) or b"").count(needle)
    return found
