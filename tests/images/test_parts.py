"""The parts of the images' test that need neither root nor its tools."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from deploy.docker.wheel_sizes import Sizes, computed, sizes
from tests.images import missing, runc, seccomp
from tests.images.runc import Image, ImageRuntime, config, read_images, write_images
from tests.manifests.manifests import Container, Mount
from tests.manifests.runtime import Root

IMAGE = Image("/images/router", {"PATH": "/opt/baton/bin"}, "/tmp")
PROFILE = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "defaultErrnoRet": 38,
    "syscalls": [
        {"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": [], "includes": {}, "excludes": {}},
        {"names": ["chroot"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_CHROOT"]}},
        {
            "names": ["chroot"],
            "action": "SCMP_ACT_ERRNO",
            "errnoRet": 1,
            "excludes": {"caps": ["CAP_SYS_CHROOT"]},
        },
        {"names": ["arm"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["arm64"]}},
        {"names": ["x86"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64"]}},
    ],
}


def _root(folder: Path, address: str | None = None) -> Root:
    mounts = (Mount("tmp", "/tmp", False), Mount("secrets", "/run/baton/secrets", False))
    image = "ghcr.io/baton-serve/baton-router:0.2.0"
    container = Container("router", image, ("baton",), (), {}, None, None, None, (), mounts, 2**30)
    return Root(
        folder, container, folder / "volumes", {"tmp"}, "pod-1", address, 10001, 0, 1000, {"HOME": "/tmp"}
    )


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "seccomp.json"
    file.write_text(json.dumps(PROFILE))
    monkeypatch.setattr(runc, "runtime_default", lambda: seccomp.runtime_default(file))
    return file


def test_the_filter_is_that_of_a_container_without_capabilities(profile: Path) -> None:
    rules = seccomp.runtime_default(profile)["syscalls"]
    assert [(*rule["names"], rule["action"].rpartition("_")[2]) for rule in rules] == [
        ("read", "ALLOW"),
        ("chroot", "ERRNO"),
        ("x86", "ALLOW"),
    ]
    with pytest.raises(AssertionError, match="minKernel"):
        seccomp.applies({"includes": {"minKernel": "4.8"}})


def test_the_configuration_is_that_of_the_security_context(profile: Path, tmp_path: Path) -> None:
    made = config(IMAGE, _root(tmp_path), ["baton", "router"])
    process = made["process"]
    assert process["user"] == {"uid": 10001, "gid": 0, "additionalGids": [1000]}
    assert {len(kind) for kind in process["capabilities"].values()} == {0}
    assert process["noNewPrivileges"]
    assert (process["args"], process["env"]) == (["baton", "router"], ["HOME=/tmp"])
    assert made["root"] == {"path": "/images/router", "readonly": True}
    assert made["linux"]["resources"]["memory"] == {"limit": 2**30}
    assert {"type": "network"} not in made["linux"]["namespaces"]
    written = {mount["destination"]: "rw" in mount["options"] for mount in made["mounts"]}
    assert (written["/tmp"], written["/run/baton/secrets"]) == (True, False)


def test_built_images_are_found_by_name_and_others_are_this_machines(profile: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images.json", {"baton-router": IMAGE})
    runtime = ImageRuntime(read_images(tmp_path / "images.json"), tmp_path / "state")
    assert runtime.image("ghcr.io/baton-serve/baton-router:0.2.0") == IMAGE
    assert runtime.image("registry:5000/baton-router@sha256:00") == IMAGE
    assert runtime.variables("ghcr.io/baton-serve/baton-router:0.2.0") == IMAGE.variables
    assert "PYTHONPATH" in runtime.variables("docker.io/valkey/valkey:8.1-alpine")
    root = _root(tmp_path, "10.244.0.2")
    script = Path(runtime.start_command(root, ["baton"])[-1]).read_text()
    assert "ip addr add 10.244.0.2/16" in script
    assert "runc --root" in script
    assert runtime.inner_pid(root, 1) is None


def test_what_is_missing_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None if program in {"buildah", "runc"} else program)
    monkeypatch.setattr(missing, "PROFILE", tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    said = missing.missing(tmp_path)
    assert said is not None
    assert "buildah runc golang-github-containers-common (tools/image_proof.sh installs them)" in said
    assert said.count("root, for runc") == 1
    assert "\n" not in said


def test_sizes_of_wheels(tmp_path: Path) -> None:
    for name, content in (("a", 1000), ("b", 20000)):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("file", bytes(content))
    (tmp_path / "notes.txt").write_text("not a wheel")
    found = sizes(tmp_path)
    assert (found.wheels, found.unpacked) == (2, 21000)
    assert found.packed == sum(file.stat().st_size for file in tmp_path.glob("*.whl"))
    assert computed(500, Sizes(1, 10, 100), Sizes(2, 50, 700)) == 1100
