"""Contents of the wheel, built from the sdist: our packages, their data, the demo model, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("baton", "kvtransfer", "loadgen", "services", "models", "bench", "tests/packaging")
PACKAGES = {"baton", "kvtransfer", "loadgen", "services"}
# What pip does with a checkout, and with the sdist that comes of it.
BUILD = """
import os, shutil, sys
from setuptools import build_meta
out = sys.argv[1]
source = build_meta.build_sdist(out)
shutil.unpack_archive(os.path.join(out, source), out)
os.chdir(os.path.join(out, source.removesuffix(".tar.gz")))
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built by way of the sdist without a network, from a copy, since a build writes beside its sources."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, copy)
    for name in SOURCES:
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], capture_output=True, text=True, timeout=120, cwd=copy
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("baton_serve-*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


def test_its_packages_are_ours_alone(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


def test_every_module_and_data_file_is_in_it(wheel: zipfile.ZipFile) -> None:
    kinds = ("*.py", "*.css", "*.cu", "*.json", "*.safetensors", "*.yaml")
    wanted = {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for kind in kinds
        for path in (REPOSITORY / package).rglob(kind)
    }
    assert len(wanted) > 300
    assert wanted - set(wheel.namelist()) == set()


def test_the_demo_model_is_data_of_the_package(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if name.startswith("baton/demo_model/")}
    folder = REPOSITORY / "baton" / "demo_model"
    assert shipped == {f"baton/demo_model/{path.name}" for path in folder.iterdir()}
    weights = wheel.getinfo("baton/demo_model/model.safetensors")
    assert weights.file_size == (folder / "model.safetensors").stat().st_size
