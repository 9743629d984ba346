"""The Dockerfiles and what they install. Images are built by tests/images."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from deploy.docker.lock import needs_of_first_release
from tests.deploy import tools
from tests.deploy.chart import case

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
IMAGES = {"router": ("router", "hub", "otel"), "worker": ("worker", "hub", "cluster", "otel")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _lines(image: str) -> list[str]:
    """Instructions of a Dockerfile, continued lines joined."""
    text = (DOCKER / f"{image}.Dockerfile").read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def locked(name: str) -> dict[NormalizedName, str]:
    """Versions by package of a file of locked requirements; each has a hash."""
    versions = {}
    for line in (DOCKER / f"requirements-{name}.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            found = re.fullmatch(r"([\w.-]+)==(\S+)(?: ; ([^-]+))? --hash=sha256:[0-9a-f]{64}", line)
            assert found, line
            versions[canonicalize_name(found[1])] = found[2]
    return versions


@pytest.mark.parametrize("image", IMAGES)
def test_bases_are_pinned_by_a_digest_that_each_build_names(image: str) -> None:
    lines = _lines(image)
    bases = [line for line in lines if line.startswith("FROM ")]
    if image == "worker":
        bases.remove("FROM scratch AS kernels")
        bases.remove("FROM scratch AS wheels")
    assert len(bases) == 2
    assert all(base.split()[1] == "${PYTHON_IMAGE}@${PYTHON_DIGEST}" for base in bases)
    assert "ARG PYTHON_DIGEST" in lines


@pytest.mark.parametrize("image", IMAGES)
def test_image_runs_as_the_charts_user(image: str) -> None:
    final = _lines(image)
    final = final[max(index for index, line in enumerate(final) if line.startswith("FROM ")) :]
    user = next(line for line in final if line.startswith("USER "))
    security = case("default").pods()["demo-baton-router"]["securityContext"]
    assert user == f"USER {security['runAsUser']}:{security['runAsGroup']}"
    assert not [line for line in final[final.index(user) :] if line.startswith("RUN ")]


@pytest.mark.parametrize("image", IMAGES)
def test_image_starts_what_the_chart_starts(image: str) -> None:
    rendered = case("default").container(f"demo-baton-{'workers' if image == 'worker' else image}")
    command = next(line for line in _lines(image) if line.startswith("CMD "))
    assert re.findall(r'"([^"]*)"', command) == rendered["command"]
    exposed = {int(port) for line in _lines(image) if line.startswith("EXPOSE ") for port in line.split()[1:]}
    ports = {port["containerPort"] for port in rendered["ports"]}
    assert ports & exposed
    assert "ENTRYPOINT []" in _lines(image)


@pytest.mark.parametrize("image", IMAGES)
def test_everything_is_installed_by_hash(image: str) -> None:
    installs = re.findall(r"pip install ([^&]*)", " ".join(_lines(image)))
    assert len(installs) == 3
    assert all("--require-hashes" in one or "--no-deps --no-index" in one for one in installs)


@pytest.mark.parametrize("name", [*IMAGES, "worker-cpu", "build"])
def test_locked_versions_are_those_of_the_constraints(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    wanted = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    versions = locked(name)
    assert versions
    assert {
        package: version for package, version in versions.items() if wanted.get(package, version) != version
    } == {}


def _asked(image: str) -> list[Requirement]:
    """The requirements that the project has in an image."""
    extras, waiting = {*IMAGES[image]}, [*IMAGES[image]]
    asked = [Requirement(line) for line in PROJECT["dependencies"]]
    while waiting:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][waiting.pop()]):
            if requirement.name == PROJECT["name"]:
                waiting += requirement.extras - extras
                extras |= requirement.extras
            else:
                asked.append(requirement)
    return asked


def _needs(requirement: Requirement, version: str) -> list[Requirement] | None:
    """The requirements of a locked package; None where this version of it is not installed here."""
    try:
        # Without the local part: torch is installed here as 2.13.0+cpu.
        if Version(importlib.metadata.version(requirement.name)).public != version:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    lines = map(Requirement, importlib.metadata.requires(requirement.name) or ())
    # The images' Python, not the one that runs the test: the latest 3.11, or Debian 12's.
    environments = [
        {"python_version": "3.11", "python_full_version": python, "extra": extra}
        for python in ("3.11.14", "3.11.2")
        for extra in ("", *requirement.extras)
    ]
    return [one for one in lines if one.marker is None or any(map(one.marker.evaluate, environments))]


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_the_project_asks_for_is_locked(image: str) -> None:
    versions = locked(image)
    for requirement in _asked(image):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_locked_packages_need_is_locked_and_nothing_else(image: str) -> None:
    versions, waiting = locked(image), _asked(image)
    seen: set[str] = set()
    unknown = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(versions[name]), requirement
        if str(requirement) not in seen:
            seen |= {str(requirement), name}
            needs = _needs(requirement, versions[name])
            waiting += needs or []
            unknown |= {name} if needs is None else set()
    # The torch that tests have brings none of NVIDIA's libraries.
    assert {name for name in versions.keys() - seen if not re.match("nvidia|cuda", name)} == set()
    assert len(unknown) <= 3, unknown


def test_router_has_no_torch_and_worker_has_it_with_cuda() -> None:
    router, worker = locked("router"), locked("worker")
    assert not [name for name in router if re.match("torch|triton|ray|nvidia", name)]
    assert "+" not in worker[canonicalize_name("torch")]
    assert [name for name in worker if name.startswith("nvidia-nccl-")]
    assert "triton" in worker


def test_the_image_without_cuda_has_the_same_packages_but_for_torch() -> None:
    with_cuda, without = locked("worker"), locked("worker-cpu")
    torch = canonicalize_name("torch")
    assert without.pop(torch) == f"{with_cuda.pop(torch)}+cpu"
    assert without == {name: it for name, it in with_cuda.items() if not re.match("nvidia|cuda", name)}


def test_what_only_the_first_releases_of_python_need_is_locked_for_them() -> None:
    """Debian 12 has Python 3.11.2."""
    old = 'python_full_version < "3.11.3"'
    requires = [
        "always>=1",
        f"sometimes>=4; {old}",
        f'an-extra; {old} and extra == "x"',
        'a; os_name == "nt"',
    ]
    found = needs_of_first_release([{"metadata": {"requires_dist": requires}}, {"metadata": {}}])
    assert {name: str(marker) for name, marker in found.items()} == {"sometimes>=4": old}
    for image in ("router", "worker", "worker-cpu"):
        lines = (DOCKER / f"requirements-{image}.txt").read_text(encoding="utf-8").splitlines()
        assert [line.partition(" ; ")[2][: len(old)] for line in lines if " ; " in line] == [old]


@pytest.mark.parametrize("image", IMAGES)
def test_context_has_what_is_copied(image: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "*" in ignored
    copied = [
        line.split()[1:-1] for line in _lines(image) if line.startswith("COPY ") and "--from" not in line
    ]
    written = (part for parts in copied for part in parts)
    locks = ("worker", "worker-cpu")
    for source in {part.replace("${LOCK}", lock) for part in written for lock in locks}:
        assert (ROOT / source).exists()
        assert any(Path(source).match(pattern) for pattern in kept), source


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str) -> None:
    command = [str(tools.hadolint()), "--no-color", str(DOCKER / f"{image}.Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
