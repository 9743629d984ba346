"""Computes how large an image of locked wheels is, without building it.

    python -m deploy.docker.wheel_sizes                 sizes of the wheels with CUDA, and of those without
    python -m deploy.docker.wheel_sizes --built BYTES   also that of the image with CUDA, from the size with
                                                        which the image without CUDA was built

pip downloads the wheels (3 GB) into a temporary folder; it must find torch's CPU wheel too. The two images
differ in their wheels alone, so their sizes differ by what these unpack to.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.docker.lock import FOLDER

CUDA, CPU = "worker", "worker-cpu"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of wheels: as they are downloaded, and unpacked."""

    wheels: int
    packed: int
    unpacked: int


def sizes(folder: Path) -> Sizes:
    """The sizes of all wheels in a folder."""
    found = sorted(folder.glob("*.whl"))
    packed = sum(wheel.stat().st_size for wheel in found)
    return Sizes(len(found), packed, sum(map(_unpacked, found)))


def _unpacked(wheel: Path) -> int:
    with zipfile.ZipFile(wheel) as opened:
        return sum(member.file_size for member in opened.infolist())


def computed(built: int, built_of: Sizes, wanted: Sizes) -> int:
    """The size of an image that has the wheels `wanted` where one of `built` bytes has `built_of`."""
    return built - built_of.unpacked + wanted.unpacked


def download(lock: str, folder: Path) -> Sizes:
    """Has pip download the wheels of a lock; their sizes. Raises CalledProcessError where pip cannot."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += [
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        "-r",
        str(FOLDER / f"requirements-{lock}.txt"),
    ]
    subprocess.run(command, check=True)
    return sizes(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the sizes; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docker.wheel_sizes", description=__doc__)
    parser.add_argument(
        "--built", type=int, metavar="BYTES", help="size of the image without CUDA as it was built"
    )
    arguments = parser.parse_args(argv)
    found = {}
    for lock in (CPU, CUDA):
        with tempfile.TemporaryDirectory() as folder:
            found[lock] = download(lock, Path(folder))
        one = found[lock]
        print(f"{lock}: {one.wheels} wheels, {one.packed / 1e9:.2f} GB, unpacked {one.unpacked / 1e9:.2f} GB")
    if arguments.built:
        image = computed(arguments.built, found[CPU], found[CUDA])
        print(f"image of {CUDA}: {image / 1e9:.2f} GB, computed, not built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
