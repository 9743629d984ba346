"""Both images, built on a base of Debian's packages, serve and stop as the chart runs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.images.missing import DISK_BYTES, missing
from tests.images.runc import write_images
from tests.images.store import Store
from tests.manifests.namespace import run_tests

SCENARIO = Path(__file__).with_name("scenario.py")
WHEELS = "BATON_CPU_WHEELS"
BUILT = ("router", "worker")
CPU_TORCH = "torch===2.13.0+cpu"
_WITHIN_S, _RUN_S = 2400, 600
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Built:
    """`file` names the images for the scenarios; `disk_bytes`: what the store took."""

    file: Path
    disk_bytes: int


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Both images, unpacked into folders."""
    folder = tmp_path_factory.mktemp("images")
    if lacking := missing(folder):
        pytest.skip(lacking)
    wheels = _wheels(folder / "wheels")
    store = Store(folder / "store")
    try:
        with _logged(store, "base"):
            digest = store.make_base()
        with _logged(store, "router"):
            store.build("router", digest)
        with _logged(store, "worker"):
            store.build("worker", digest, arguments={"LOCK": "worker-cpu"}, contexts={"wheels": wheels})
        write_images(folder / "images.json", {f"baton-{name}": store.unpacked(name) for name in BUILT})
        yield Built(folder / "images.json", store.disk_bytes())
    finally:
        store.remove()
        shutil.rmtree(folder)


def _wheels(folder: Path) -> Path:
    """The folder of torch's CPU wheel: the one that BATON_CPU_WHEELS names, or what pip finds as it is set up
    here."""
    if given := os.environ.get(WHEELS):
        return Path(given)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        CPU_TORCH,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"images need torch's CPU wheel: {WHEELS}=DIR, or a pip that finds {CPU_TORCH}")
    return folder


@contextlib.contextmanager
def _logged(store: Store, name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    size = store.bytes_of(name) / 1e6
    print(f"\nimages: baton-{name} of {size:.0f} MB in {time.monotonic() - began:.0f} s", end="")


@pytest.mark.timeout(_WITHIN_S)
def test_both_images_are_built_within_the_disk(images: Built) -> None:
    print(f"\nimages: {images.disk_bytes / 1e9:.1f} GB of disk", end="")
    assert images.disk_bytes <= DISK_BYTES


@pytest.mark.timeout(_RUN_S)
@pytest.mark.parametrize("release", ["chart-user-tls", "random-user"])
def test_pods_of_the_images_serve_and_stop(
    images: Built, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_IMAGES", str(images.file))
    run_tests(SCENARIO, "-k", release, within_s=_RUN_S, own_users=False)
