"""Makes a release in dist/.

    make release VERSION=1.2.3
    make release VERSION=1.2.3 ARGS='--push ghcr.io/you'
    make release VERSION=1.2.3 ARGS=--without-images

Sets the version in pyproject.toml and Chart.yaml, and builds wheel, sdist, packaged chart, bills of materials
and images, all with this version. Committing, tagging and publishing is left to its caller.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.release import artifacts, git, images
from deploy.release.errors import ReleaseError, exit_code
from deploy.release.images import DIST
from deploy.release.version import ROOT, checked, set_version


def release(
    version: str, out: Path, push: str | None, kernels: Path | None = None, *, with_images: bool
) -> None:
    """Makes a release in a folder: dist/, which is emptied first, or an empty one. Raises ReleaseError; what
    can be known to fail fails before anything is changed.
    """
    checked(version)
    if out != DIST and out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty")
    if with_images:
        images.check_kernels(kernels, version)
        images.need_builder()
    digest = images.base_digest(os.environ) if with_images else ""
    set_version(version)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    time = git.commit_time(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        git.export(ROOT, source)
        artifacts.distributions(source, out, time)
        artifacts.chart(source, out)
        for image in images.NAMES:
            artifacts.bill_of_materials(source, image, version, out, time)
    if with_images:
        images.build_all(images.Build(version, out, push, digest, kernels=kernels))
    wrong = {name: found for name, found in artifacts.versions(out).items() if found != version}
    if wrong:
        raise ReleaseError(f"not {version}: {wrong}")
    artifacts.sums(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes a release and prints its files; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("version", nargs="?", default="", metavar="VERSION")
    images.add_flags(parser)
    parser.add_argument("--without-images", action="store_true", help="build no images; needs no docker")
    arguments = parser.parse_args(argv)

    def work() -> None:
        given = (arguments.version, arguments.out, arguments.push, arguments.kernels)
        release(*given, with_images=not arguments.without_images)
        for file in sorted(arguments.out.iterdir()):
            print(file.name)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
