"""Runs a module of tests in namespaces of its own, as root of them: there it may make networks and mounts."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

_ROOT = ("--user", "--map-root-user")
_NEW = (
    "--net",
    "--mount",
    "--pid",
    "--ipc",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_ATTEMPT = """
ip link add pods type bridge
ip link add veth0 type veth peer name eth0
mount -t tmpfs root /mnt
exec unshare --user --map-user=10001 setpriv --no-new-privs nsenter --version
"""
_SHOWN = 12000


@functools.cache
def why_not(attempt: str = _ATTEMPT) -> str | None:
    """The feature that this machine lacks for `attempt`, a script of the shell; None: nothing."""
    try:
        done = subprocess.run(
            ["unshare", *_ROOT, *_NEW, "sh", "-ec", attempt],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except FileNotFoundError as error:
        return f"no command {error.filename}"
    return None if done.returncode == 0 else f"no namespaces for containers: {done.stderr.strip()}"


def run_tests(module: Path, *arguments: str, within_s: float, own_users: bool = True) -> None:
    """Runs pytest on a module, and prints what its tests say of what they have proved. Without `own_users`
    ids of users are this machine's, and this process must be root. Raises AssertionError with the output
    where a test fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Without the settings of all other tests, which load torch.
    command += ["--confcutdir", str(module.parent), "-o", "addopts=--strict-markers", "--tb=short", "-s"]
    command += [str(module), *arguments]
    done = subprocess.run(
        ["unshare", *(_ROOT if own_users else ()), *_NEW, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-_SHOWN:]
    for line in done.stdout.splitlines():
        if line.startswith("PROOF "):
            print(f"\n{module.stem}: {line}", end="")
