"""A whole release without images, as `make release` makes it; what pip says of the locked packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from deploy.release import artifacts, git
from tests.deploy import tools
from tests.deploy.test_images import locked

ROOT = Path(__file__).parents[2]
VERSION = "7.8.9"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dist/ of a release of another version, made in a copy of this tree."""
    tree = tmp_path_factory.mktemp("tree")
    git.export(ROOT, tree)
    author = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    for arguments in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "copy"]):
        subprocess.run(["git", *arguments], cwd=tree, check=True, timeout=60)
    # The release's tools in an environment of their own; Helm and YAML from this one.
    here = [path for path in sys.path if path.endswith("site-packages")]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tree), *here])}
    done = subprocess.run(
        [tools.release_python(), "-m", "deploy.release", VERSION, "--without-images"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    changed = subprocess.run(["git", "diff", "--stat"], cwd=tree, capture_output=True, text=True, check=True)
    assert "2 files changed, 3 insertions(+), 3 deletions(-)" in changed.stdout
    return tree / "dist"


def test_everything_has_the_version(dist: Path) -> None:
    names = {
        f"baton_serve-{VERSION}-py3-none-any.whl",
        f"baton_serve-{VERSION}.tar.gz",
        f"baton-{VERSION}.tgz",
        f"baton-router-{VERSION}.cdx.json",
        f"baton-worker-{VERSION}.cdx.json",
    }
    assert {file.name for file in dist.iterdir()} == names | {artifacts.SUMS}
    assert set(artifacts.versions(dist).values()) == {VERSION}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", artifacts.SUMS], cwd=dist, check=True)
    assert len((dist / artifacts.SUMS).read_text(encoding="utf-8").splitlines()) == len(names)


@pytest.mark.parametrize("image", ["router", "worker"])
def test_bills_of_materials_name_what_is_locked(image: str, dist: Path) -> None:
    bill: dict[str, Any] = json.loads(
        (dist / f"baton-{image}-{VERSION}.cdx.json").read_text(encoding="utf-8")
    )
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "baton-serve"
    wanted = locked(image)
    assert {canonicalize_name(one["name"]): one["version"] for one in bill["components"]} == wanted
    for component in bill["components"]:
        assert component["purl"].startswith(f"pkg:pypi/{canonicalize_name(component['name'])}@")
        (distribution,) = component["externalReferences"]
        assert [one["alg"] for one in distribution["hashes"]] == ["SHA-256"]


@pytest.mark.parametrize("image", ["router", "build"])
def test_pip_takes_what_is_locked_and_needs_nothing_else(image: str) -> None:
    """A lock that lacks a package, or a hash of one, is refused. The worker's is gigabytes."""
    file = ROOT / "deploy" / "docker" / f"requirements-{image}.txt"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--require-hashes", "--only-binary", ":all:", "-r", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
