"""No part of a rendered manifest is overlooked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.chart import Object
from tests.manifests.cluster import Cluster
from tests.manifests.fields import Fields, UnknownFieldError
from tests.manifests.manifests import read_deployment
from tests.manifests.releases import NAME, rendered
from tests.manifests.volumes import ObjectFiles, Store, read_volume, write_files

Change = Callable[[Object], None]


def _container(deployment: Object) -> Object:
    container: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


CHANGES: dict[str, Change] = {
    "hostNetwork": lambda one: one["spec"]["template"]["spec"].update(hostNetwork=True),
    "workingDir": lambda one: _container(one).update(workingDir="/"),
    "exec": lambda one: _container(one)["livenessProbe"].update(exec={"command": ["true"]}),
    "secretKeyRef": lambda one: _container(one)["env"].append(
        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "b", "key": "c"}}}
    ),
    "hostPort": lambda one: _container(one)["ports"][0].update(hostPort=80),
    "subPath": lambda one: _container(one)["volumeMounts"][0].update(subPath="a"),
    "hostPath": lambda one: one["spec"]["template"]["spec"]["volumes"][0].update(hostPath={"path": "/"}),
    "minReadySeconds": lambda one: one["spec"].update(minReadySeconds=3),
}


@pytest.mark.parametrize("key", CHANGES)
def test_an_unknown_key_is_an_error(key: str) -> None:
    deployment = copy.deepcopy(rendered("node", tls=False).of_kind("Deployment")[f"{NAME}-workers"])
    assert read_deployment(deployment).name == f"{NAME}-workers"
    CHANGES[key](deployment)
    with pytest.raises(UnknownFieldError, match=key):
        read_deployment(deployment)


def test_a_mount_without_a_volume_and_a_volume_without_a_mount_are_errors() -> None:
    deployment = copy.deepcopy(rendered("node", tls=False).of_kind("Deployment")[f"{NAME}-router"])
    mounts = _container(deployment)["volumeMounts"]
    unmounted = mounts.pop()
    with pytest.raises(AssertionError, match="volumes that nothing mounts"):
        read_deployment(deployment)
    mounts += [unmounted, {"name": "none", "mountPath": "/none"}]
    with pytest.raises(AssertionError, match="mounts of no volume"):
        read_deployment(deployment)


def test_an_object_of_an_unknown_kind_is_an_error(tmp_path: Path) -> None:
    release = rendered("node", tls=False)
    job: Object = {"kind": "Job", "metadata": {"name": "job"}}
    with pytest.raises(AssertionError, match="Job"):
        Cluster(type(release)(release.texts, (*release.objects, job)), {}, tmp_path)


def _files(volume: Object) -> ObjectFiles:
    _, read = read_volume(Fields({"name": "files", **volume}, "files"))
    assert isinstance(read, ObjectFiles)
    return read


def test_files_are_those_of_the_items_and_are_replaced_all_at_once(tmp_path: Path) -> None:
    items = [{"key": "a", "path": "b"}]
    sources = [{"secret": {"name": "one", "items": items}}, {"configMap": {"name": "two"}}]
    volume = _files({"projected": {"defaultMode": 0o440, "sources": sources}})
    store: Store = {("secret", "one"): {"a": "1", "not": "mounted"}, ("configMap", "two"): {"c": "2"}}
    write_files(tmp_path, volume, store)
    seen = {one.name: one.read_text() for one in tmp_path.iterdir() if not one.name.startswith("..")}
    assert seen == {"b": "1", "c": "2"}
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o440
    before = (tmp_path / "..data").readlink()
    write_files(tmp_path, volume, {**store, ("secret", "one"): {"a": "3"}})
    assert (tmp_path / "b").read_text() == "3"
    assert (tmp_path / "b").readlink() == Path("..data/b")
    assert (tmp_path / "..data").readlink() != before


def test_a_missing_object_or_key_is_an_error_unless_it_is_optional() -> None:
    items = [{"key": "a", "path": "a"}]
    needed = _files({"secret": {"secretName": "one", "items": items}})
    stores: tuple[Store, ...] = ({}, {("secret", "one"): {"b": ""}})
    for store in stores:
        with pytest.raises(AssertionError, match="one"):
            needed.contents(store)
    assert _files({"secret": {"secretName": "one", "items": items, "optional": True}}).contents({}) == {}
