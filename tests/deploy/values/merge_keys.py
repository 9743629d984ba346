"""Lists that Kubernetes' server-side apply merges by a key, in the objects that the chart makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# By the list's name within a pod's spec, within a container, or at the top of the named kind's spec.
OF_PODS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
}
OF_CONTAINERS = {
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
}
OF_SPECS = {"Service": {"ports": ("port", "protocol")}}
DEFAULTS = {"protocol": "TCP"}


def repeated(made: Any) -> list[str]:
    """Merge keys that an object repeats, each with the path of its list."""
    return [*_repeated(made, made["kind"]), *_of_spec(made)]


def _of_spec(made: Any) -> Iterator[str]:
    for name, keys in OF_SPECS.get(made["kind"], {}).items():
        yield from _twice(made["spec"].get(name, ()), keys, f"{made['kind']}.{name}")


def _repeated(part: Any, path: str) -> Iterator[str]:
    if isinstance(part, list):
        for entry in part:
            yield from _repeated(entry, path)
    elif isinstance(part, dict):
        tables = OF_PODS if "containers" in part else OF_CONTAINERS if "image" in part else {}
        for name, keys in tables.items():
            yield from _twice(part.get(name, ()), keys, f"{path}.{name}")
        # A container's ports have names that probes and Services use.
        if "image" in part:
            yield from _twice(
                [one for one in part.get("ports", ()) if "name" in one], ("name",), f"{path}.ports"
            )
        for key, value in part.items():
            yield from _repeated(value, f"{path}.{key}")


def _twice(entries: Any, keys: tuple[str, ...], path: str) -> Iterator[str]:
    seen = set()
    for entry in entries:
        key = tuple(entry.get(name, DEFAULTS.get(name)) for name in keys)
        if key in seen:
            yield f"{path}: {key}"
        seen.add(key)
