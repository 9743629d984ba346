"""Sources of the model, and folders of compiled kernels."""

from __future__ import annotations

import pytest

from tests.deploy.chart import Object, case, render, render_with


def _volume(spec: Object, name: str) -> Object:
    return next(volume for volume in spec["volumes"] if volume["name"] == name)


def test_demo_model_needs_no_volume() -> None:
    for component in ("router", "workers"):
        assert case("default").config(component)["model"] == "demo"
        assert case("default").config(component)["served_model_name"] == "baton-demo"
        volumes = case("default").pods()[f"demo-baton-{component}"]["volumes"]
        assert "model" not in {volume["name"] for volume in volumes}


def test_model_on_a_volume_is_mounted_read_only_everywhere() -> None:
    rendered = case("model-pvc")
    for component in ("router", "workers"):
        spec = rendered.pods()[f"chat-{component}"]
        assert _volume(spec, "model")["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        assert {"name": "model", "mountPath": "/models", "readOnly": True} in spec["containers"][0][
            "volumeMounts"
        ]
        data = rendered.one("ConfigMap", f"chat-{component}")["data"][f"{component}.yaml"]
        assert "model: /models/llama/8b" in data


def test_model_in_a_folder_of_the_node() -> None:
    rendered = render_with(
        "default", model={"source": "hostPath", "servedName": "m", "hostPath": {"path": "/data/m"}}
    )
    spec = rendered.pods()["demo-baton-workers"]
    assert _volume(spec, "model")["hostPath"] == {"path": "/data/m", "type": "Directory"}
    assert rendered.config("workers")["model"] == "/models"


def test_model_of_a_hub_is_loaded_by_an_init_container_into_a_shared_folder() -> None:
    rendered = case("model-hub")
    spec = rendered.pods()["demo-baton-workers"]
    (init,) = spec["initContainers"]
    assert init["command"] == ["baton", "model", "fetch", "--config", "/etc/baton/workers.yaml"]
    assert {"name": "model", "mountPath": "/models"} in init["volumeMounts"]
    assert _volume(spec, "model")["hostPath"]["path"] == "/var/cache/baton/models"
    config = rendered.config("workers")
    assert config["model"] == "/models/Qwen--Qwen3-8B@main"
    assert config["model_source"] == {
        "hub_id": "Qwen/Qwen3-8B",
        "revision": "main",
        "files": "all",
        "token_file": "/run/baton/hub/hub-token",
    }
    router = rendered.config("router")
    assert router["model"] == "/models/Qwen--Qwen3-8B@main-tokenizer"
    assert router["model_source"]["files"] == "tokenizer"


def test_routers_need_no_folder_of_their_node() -> None:
    spec = case("model-hub").pods()["demo-baton-router"]
    assert "emptyDir" in _volume(spec, "model")


def test_only_the_init_container_has_the_hubs_token() -> None:
    spec = case("model-hub").pods()["demo-baton-workers"]
    assert _volume(spec, "hub")["secret"]["secretName"] == "hub"
    assert "hub" in {mount["name"] for mount in spec["initContainers"][0]["volumeMounts"]}
    assert "hub" not in {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({"cache": "emptyDir", "sizeLimit": "9Gi"}, {"emptyDir": {"sizeLimit": "9Gi"}}),
        ({"cache": "pvc", "claimName": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
        ({"cache": "hostPath", "hostPath": "/c"}, {"hostPath": {"path": "/c", "type": "Directory"}}),
    ],
)
def test_where_a_hubs_model_is_kept(cache: Object, volume: Object) -> None:
    values = {"model": {"source": "hub", "servedName": "m", "hub": {"id": "a/b", **cache}}}
    assert _volume(render(values).pods()["demo-baton-workers"], "model") == {"name": "model", **volume}


def test_model_in_an_image_as_volume() -> None:
    spec = case("model-image").pods()["demo-baton-workers"]
    assert _volume(spec, "model")["image"] == {
        "reference": "registry.example.com/models/qwen:1",
        "pullPolicy": "IfNotPresent",
    }
    assert "initContainers" not in spec
    assert case("model-image").config("workers")["model"] == "/models/weights"


def test_model_in_an_image_copied() -> None:
    spec = case("model-image-copy").pods()["demo-baton-decode"]
    (init,) = spec["initContainers"]
    assert init["image"] == "registry.example.com/models/qwen:1"
    assert init["command"] == ["cp", "-rL", "/weights/.", "/models/"]
    assert _volume(spec, "model")["emptyDir"] == {"sizeLimit": "20Gi"}
    assert case("model-image-copy").config("decode")["model"] == "/models"


@pytest.mark.parametrize(
    ("name", "pod", "volume"),
    [
        ("default", "demo-baton-workers", {"emptyDir": {"sizeLimit": "2Gi"}}),
        ("model-pvc", "chat-workers", {"persistentVolumeClaim": {"claimName": "kernels"}}),
        (
            "model-hub",
            "demo-baton-workers",
            {"hostPath": {"path": "/var/cache/baton/kernels", "type": "Directory"}},
        ),
    ],
)
def test_kernel_cache_is_a_volume(name: str, pod: str, volume: Object) -> None:
    spec = case(name).pods()[pod]
    assert _volume(spec, "kernels") == {"name": "kernels", **volume}
    mounts = spec["containers"][0]["volumeMounts"]
    assert {"name": "kernels", "mountPath": "/var/cache/baton/kernels"} in mounts
