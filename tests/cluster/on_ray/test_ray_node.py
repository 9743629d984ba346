"""A Ray of our own: the ports that it is given, and that no other user reaches into its folder."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.cluster.on_ray import ray_node
from services.cluster.on_ray.ray_node import RayNode, free_ports
from services.common.config.settings_tree.reader import read_secrets
from services.common.processes.process_tree import descendants

# What Ray does to its folder, and the address that it prints.
FAKE_RAY = """
import os, sys, time
os.makedirs(sys.argv[1], exist_ok=True)
os.chmod(sys.argv[1], 0o777)
print("Local node IP: 127.0.0.1", "Ray runtime started", sep="\\n", flush=True)
time.sleep(600)
"""
# As another user, `nobody`: what it could put in place of each file named.
REPLACE = """
import os, sys
os.setgroups(()), os.setgid(65534), os.setuid(65534)
for path in sys.argv[1:]:
    try:
        os.rename(path, path + ".theirs")
        print(path)
    except OSError:
        pass
"""


def test_ports_are_free_and_not_ephemeral() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    with ExitStack() as stack:
        given = [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(50)]
        assert max(ports) < min(given)
        for port in ports:
            stack.enter_context(socket.create_server(("", port)))


@pytest.fixture
def kernel_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Called, it has the ephemeral ports begin there."""

    def begin(first: int) -> None:
        (tmp_path / "range").write_text(f"{first}\t65535\n")
        monkeypatch.setattr(ray_node, "EPHEMERAL_PORTS", tmp_path / "range")

    return begin


@pytest.mark.parametrize("first_given", [1024, 10_003])
def test_where_the_kernel_gives_almost_all_of_them(
    kernel_gives: Callable[[int], None], first_given: int
) -> None:
    kernel_gives(first_given)
    assert len(set(free_ports(5))) == 5


def test_one_that_is_taken_is_passed_over(kernel_gives: Callable[[int], None]) -> None:
    (port,) = free_ports(1)
    kernel_gives(port + 1)
    assert free_ports(1, lowest=port, tried=1) == [port]
    with socket.create_server(("", port)), pytest.raises(OSError, match="free"):
        free_ports(1, lowest=port, tried=1)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def head(
        folder: Path, ports: Sequence[int], prestarted: int, gpus: int, room: Mapping[str, int]
    ) -> tuple[str, ...]:
        return sys.executable, "-c", FAKE_RAY, str(folder)

    monkeypatch.setattr(ray_node, "head_command", head)


@pytest.mark.usefixtures("fake_ray")
async def test_no_other_user_can_replace_what_is_private() -> None:
    ray = RayNode.head({}, prestarted=1, gpus=0, room={})
    try:
        await ray.address()
        token = Path(ray.environment["RAY_AUTH_TOKEN_PATH"])
        assert replaceable(token, ray.folder / "start.log", ray.folder / "r") == []
        assert (mode(token), mode(ray.folder)) == (0o600, 0o700)
        assert mode(ray.folder / "r") == 0o777, "it was not faked"
    finally:
        await ray.stop()
    assert not ray.folder.exists()


@pytest.mark.usefixtures("fake_ray")
async def test_secrets_are_in_a_private_file_and_in_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"prefix_secret": "canary-in-the-environment"}
    monkeypatch.setenv("BATON_PREFIX_SECRET", shared["prefix_secret"])
    ray = RayNode.head({}, prestarted=1, gpus=0, room={})
    try:
        await ray.address()
        below = [pid for pid in descendants(os.getpid()) if FAKE_RAY in command_line(pid)]
        assert len(below) == 2, "reaper and fake Ray"
        for pid in below:
            assert shared["prefix_secret"].encode() not in environment(pid)
            assert b"RAY_AUTH_TOKEN_PATH" in environment(pid)
        file = ray.write_secrets(shared)
        assert (mode(file), file.parent) == (0o600, ray.folder)
        assert read_secrets(file) == shared
    finally:
        await ray.stop()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def replaceable(*paths: Path) -> list[str]:
    """Folders that another user can rename, and so replace."""
    if os.geteuid() == 0:
        command = [sys.executable, "-I", "-c", REPLACE, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()
    return [str(path) for path in paths if not any(closed(folder) for folder in path.parents)]


def closed(folder: Path) -> bool:
    return mode(folder) & 0o077 == 0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("length", [4, 20, 27, 28, 41, 60])
def test_sockets_have_room_in_their_paths(
    length: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray appends up to 65 bytes to its folder, and a socket's path has 107 at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        base = "/tmp" if length == 4 else root.ljust(length, "x")[: max(length, len(root))]
        Path(base).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", base)
        folder = ray_node.short_folder()
        try:
            assert len(os.fsencode(ray_node.ray_folder(folder))) + 65 <= 107
            assert mode(folder) == 0o700
        finally:
            folder.rmdir()
