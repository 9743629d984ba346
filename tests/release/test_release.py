"""A release: one version everywhere, images by way of docker, and what is reported to its maker."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from helm_python import Chart

from baton.device.kernel_files.manifest import KernelManifest
from deploy.release import __main__ as command
from deploy.release import artifacts, images, version
from deploy.release.errors import ReleaseError
from tests.deploy.chart import VERSION
from tests.release.fake_docker import BASE_DIGEST, FakeDocker

ROOT = Path(__file__).parents[2]
STATED = ("pyproject.toml", "deploy/helm/baton/Chart.yaml")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that state the version."""
    for name in STATED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("PYTHON_DIGEST", raising=False)
    return FakeDocker(folder, sys.executable)


def test_package_chart_and_images_have_one_version() -> None:
    assert version.stated() == VERSION
    chart = yaml.safe_load((ROOT / STATED[1]).read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == VERSION


def test_a_new_version_changes_three_lines(tree: Path) -> None:
    before = {name: (tree / name).read_text(encoding="utf-8").splitlines() for name in STATED}
    version.set_version("12.3.45", tree)
    assert version.stated(tree) == "12.3.45"
    changed = [
        (name, new)
        for name in STATED
        for old, new in zip(before[name], (tree / name).read_text(encoding="utf-8").splitlines(), strict=True)
        if old != new
    ]
    assert changed == [
        (STATED[0], 'version = "12.3.45"'),
        (STATED[1], "version: 12.3.45"),
        (STATED[1], 'appVersion: "12.3.45"'),
    ]


def test_versions_that_differ_are_named(tree: Path) -> None:
    chart = tree / STATED[1]
    chart.write_text(chart.read_text(encoding="utf-8").replace(f'"{VERSION}"', '"9.9.9"'), encoding="utf-8")
    with pytest.raises(ReleaseError, match=r"appVersion: \" 9\.9\.9"):
        version.stated(tree)


@pytest.mark.parametrize("wrong", ["", "1.0", "v1.0.0", "1.0.0rc1", "01.0.0", "1.0.0\n"])
def test_what_is_no_version_is_refused(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([wrong, "--without-images", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "is not a version" in err
    assert err.count("\n") == 1


def test_a_tag_that_the_files_do_not_state_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert version.main([VERSION]) == 0
    assert version.main(["99.0.0"]) == 2
    assert f"the files state {VERSION}, not 99.0.0" in capsys.readouterr().err


def test_packaged_chart_has_the_version_and_no_tests_values(tmp_path: Path) -> None:
    packed = artifacts.chart(ROOT, tmp_path)
    assert packed.name == f"baton-{VERSION}.tgz"
    assert artifacts.versions(tmp_path) == {packed.name: VERSION, f"{packed.name}: appVersion": VERSION}
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert "baton/values-cpu.yaml" in names
    assert not [name for name in names if name.startswith("baton/ci/")]
    with Chart.load_archive(packed.read_bytes()) as chart:
        rendered = chart.render({}, name="demo", namespace="llm")
    assert f"/baton-router:{VERSION}" in rendered["baton/templates/router/deployment.yaml"]
    assert f"/baton-worker:{VERSION}" in rendered["baton/templates/workers/deployments.yaml"]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"version": (1, "", "docker: unknown command")}, "plugin buildx"),
        (
            {"inspect": (1, "", "first\nERROR: Cannot connect to the Docker daemon\n")},
            "Cannot connect to the",
        ),
        ({"inspect": (0, "Name: default\nDriver:        docker\n", "")}, "docker buildx create --use"),
        ({"imagetools": (1, "", "ERROR: no such host\n")}, "no such host"),
        ({"imagetools": (0, '{"digest": "latest"}', "")}, "'latest' is not a digest"),
        ({"build": (1, "", "")}, "baton-router: docker buildx build ended with 1"),
    ],
)
def test_what_docker_lacks_is_reported(
    answers: dict[str, tuple[int, str, str]],
    words: str,
    docker: FakeDocker,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    FakeDocker(tmp_path / "docker", sys.executable, **answers)
    assert images.main(["--out", str(tmp_path / "out")]) == 2
    assert words in capfd.readouterr().err.splitlines()[-1]


def test_without_docker_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    assert images.main(["--out", str(out)]) == 2
    assert command.main(["99.0.0", "--out", str(out)]) == 2
    assert (
        capsys.readouterr().err.splitlines()
        == ["release: error: images need docker with buildx, and docker is not installed"] * 2
    )
    assert version.stated() == VERSION
    assert not out.exists()


def test_a_folder_with_files_is_not_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert command.main([VERSION, "--without-images", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()


def test_images_are_archives_with_attestations(
    docker: FakeDocker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert images.main(["--out", str(out)]) == 0
    for name, (call, epoch) in zip(("router", "worker"), docker.builds(), strict=True):
        assert call[-1] == str(ROOT)
        assert call[call.index("--file") + 1] == str(ROOT / "deploy" / "docker" / f"{name}.Dockerfile")
        assert f"type=oci,dest={out}/baton-{name}-{VERSION}.oci.tar" in call
        assert {"--provenance=mode=max", "--sbom=true", f"PYTHON_DIGEST={BASE_DIGEST}"} <= set(call)
        assert f"VERSION={VERSION}" in call
        assert epoch.isdigit()
        assert "--push" not in call
    facts = json.loads((out / "images.json").read_text(encoding="utf-8"))
    assert facts["worker"]["digest"] == "sha256:" + "2" * 64
    assert [file.name for file in out.iterdir()] == ["images.json"]
    assert capsys.readouterr().out.splitlines()[0] == f"baton-router:{VERSION} sha256:{'1' * 64}"


def test_compiled_kernels_are_a_context_of_the_workers_image_alone(
    docker: FakeDocker, tmp_path: Path
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    KernelManifest(VERSION, "2.11.0", "3.6.0", "9.0").write(kernels)
    assert images.main(["--out", str(tmp_path / "out"), "--kernels", str(kernels)]) == 0
    (router, _), (worker, _) = docker.builds()
    assert worker[worker.index("--build-context") + 1] == f"kernels={kernels}"
    assert "--build-context" not in router
    stages = images.dockerfile("worker").read_text(encoding="utf-8")
    assert "AS kernels\n" in stages
    assert "COPY --from=kernels " in stages


@pytest.mark.parametrize(
    ("baton", "refusal"), [(None, "was not made by"), ("0.0.9", "has kernels of Baton 0.0.9")]
)
def test_kernels_of_another_version_are_refused(
    docker: FakeDocker, tmp_path: Path, baton: str | None, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if baton is not None:
        KernelManifest(baton, "2.11.0", "3.6.0", "9.0").write(tmp_path)
    assert images.main(["--out", str(tmp_path / "out"), "--kernels", str(tmp_path)]) == 2
    assert refusal in capsys.readouterr().err
    assert docker.builds() == []


def test_pushed_images_come_with_values_for_the_chart(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "sha256:" + "c" * 64
    monkeypatch.setenv("PYTHON_DIGEST", given)
    assert images.main(["--out", str(tmp_path / "out"), "--push", "registry.example.com/llm/"]) == 0
    builds = docker.builds()
    assert all("--push" in call and f"PYTHON_DIGEST={given}" in call for call, _ in builds)
    assert f"registry.example.com/llm/baton-worker:{VERSION}" in builds[1][0]
    values = yaml.safe_load((tmp_path / "out" / images.DIGESTS).read_text(encoding="utf-8"))
    with Chart.load(ROOT / "deploy" / "helm" / "baton") as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="demo", namespace="llm")
    wanted = f"registry.example.com/llm/baton-worker:{VERSION}@sha256:{'2' * 64}"
    assert wanted in rendered["baton/templates/workers/deployments.yaml"]


def test_sums_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    artifacts.sums(tmp_path)
    artifacts.sums(tmp_path)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert (tmp_path / artifacts.SUMS).read_text(encoding="utf-8") == f"{digest}  a\n"
