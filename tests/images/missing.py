"""Tools and packages that this machine lacks for building and running images."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from tests.images.seccomp import PROFILE

_PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "buildah": "buildah",
    "runc": "runc",
    "unshare": "util-linux",
    "ip": "iproute2",
}
DISK_BYTES = 25_000_000_000
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def missing(folder: Path) -> str | None:
    """Returns all that is missing, in one line; None: nothing. `folder`: where images will lie."""
    lacking = [package for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    lacking += [] if PROFILE.is_file() else ["golang-github-containers-common"]
    lacking += [] if CERTIFICATES.is_file() else ["ca-certificates"]
    found = [f"Debian's packages {' '.join(lacking)} (tools/image_proof.sh installs them)"] if lacking else []
    if platform.machine() != "x86_64":
        found.append("an x86-64 machine")
    if os.geteuid() != 0:
        found.append("root, for runc")
    if shutil.disk_usage(folder).free < DISK_BYTES:
        found.append(f"{DISK_BYTES // 10**9} GB of disk below {folder}")
    return f"images need {', '.join(found)}" if found else None
