"""Each extra, installed alone, imports what it is for, and every command answers `--help`.

Fast: in this environment, with all that the extra does not bring taken away. Slow: the wheel and the sdist in
bare virtual environments.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.packaging import check_install

ROOT = Path(__file__).parents[2]
ALWAYS = ("services.cli", "baton.client", "loadgen", "services.common.config")
# What each extra is for; with a dash: what is another one's.
EXTRAS: dict[str, tuple[str, ...]] = {
    "state": ("baton.state",),
    "router": ("baton.state", "services.router"),
    "worker": (
        "baton.state",
        "baton.engine",
        "baton.device",
        "kvtransfer",
        "services.worker",
        "services.prefill",
        "services.decode",
    ),
    "cluster": ("services.cluster",),
    "hub": ("huggingface_hub",),
    "otel": ("services.common.observability.tracing.otlp",),
    "parquet": ("pyarrow.parquet",),
    "serve": ("-services.common.observability.tracing.otlp", "baton", "kvtransfer", "services", "loadgen"),
}
# For those who work on a checkout.
OF_CHECKOUTS = {"deploy", "dev", "mutation", "plots", "release"}


def test_each_extra_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == EXTRAS.keys() | OF_CHECKOUTS


def failures_of(asked: Sequence[Sequence[str]]) -> list[str]:
    """Modules that an install with each first name's extra cannot import of the modules behind it."""
    command = [sys.executable, "-m", "tests.packaging.base_only", "extras"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Modules that each extra except `serve` cannot import by itself; `lacking`: one that is asked for too
    much."""
    extras = [extra for extra in EXTRAS if extra != "serve"]
    asked = [[extra, *ALWAYS, *EXTRAS[extra]] for extra in extras]
    found = failures_of([*asked, ["router", "services.cluster"]])
    return dict(zip([*extras, "lacking"], found, strict=True))


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra != "serve"])
def test_each_extra_imports_with_nothing_else(extra: str, failures: dict[str, str]) -> None:
    assert failures[extra] == ""


@pytest.mark.slow
def test_the_extra_of_all_others_imports_everything() -> None:
    assert failures_of([["serve", *ALWAYS, *EXTRAS["serve"]]]) == [""]


def test_what_an_extra_does_not_bring_is_noticed(failures: dict[str, str]) -> None:
    assert "No module named 'ray'" in failures["lacking"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, of the files that git tracks."""
    from deploy.release import git

    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    git.export(ROOT, copy)
    backend = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", backend, str(out)], cwd=copy, check=True, timeout=120)
    (sdist,) = out.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(out), str(sdist)], check=True, timeout=120)
    return out


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_the_wheel_works_in_a_bare_environment(extra: str, built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = _environment(tmp_path, f"{wheel}[{extra}]" if extra else str(wheel))
    assert _checked(python, tmp_path, *ALWAYS, *EXTRAS.get(extra, ())) == ""
    version = subprocess.run(
        [python.parent / "baton", "--version"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert version.returncode == 0
    assert wheel.name.split("-")[1] in version.stdout
    # Gigabytes with torch; pytest keeps the folders of three runs.
    shutil.rmtree(tmp_path / "venv")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sdist_installs_in_a_bare_environment(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    python = _environment(tmp_path, str(sdist))
    assert _checked(python, tmp_path, *ALWAYS) == ""


def _environment(folder: Path, requirement: str) -> Path:
    """The Python of a new virtual environment with this and its needs, at the versions of constraints.txt."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    python = folder / "venv" / "bin" / "python"
    # As in tools/setup.sh: this torch needs no CUDA where the index has one without.
    first = ["torch==2.13.0"] if "[worker]" in requirement or "[serve]" in requirement else []
    for wanted in (first, [requirement]):
        if wanted:
            command = [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                "-c",
                str(ROOT / "constraints.txt"),
                *wanted,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
            assert done.returncode == 0, done.stderr[-2000:]
    return python


def _checked(python: Path, folder: Path, *packages: str) -> str:
    """The faults that check_install.py finds, called where no checkout is on the path."""
    command = [str(python), "-I", check_install.__file__, *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    return done.stdout + done.stderr
