"""Several copies of the chart in a namespace keep to their own pods, whatever they are called."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helm_python import Chart, HelmError

from tests.deploy.chart import CASES, CHART, Object, Rendered, Values, case, objects_in, put, values_of
from tests.deploy.values.umbrella import make_umbrella, render_umbrella

CPU: Values = {"engine": {"device": "cpu"}, "workerGroup": {"gpu": {"count": 0}}}
# Names that YAML reads as something else than a text, where they are not quoted.
ODD = ("1e3", "null")
MORE_ODD = ("123", "on", "0x1f", "true", "false", "yes", "no", "off", "y", "n", "0o17", "1.5", "0b1")


def _render(values: Values, release: str = "demo", namespace: str = "llm") -> Rendered:
    with Chart.load(CHART) as chart:
        texts = chart.render(values, name=release, namespace=namespace)
    made = [one for name, text in texts.items() if not name.endswith("NOTES.txt") for one in objects_in(text)]
    return Rendered(texts, tuple(made))


def _selectors(made: Object) -> Iterator[dict[str, str]]:
    """Selectors of an object, those of policies' peers with one of the components that they name."""
    spec = made.get("spec", {})
    if made["kind"] == "Service":
        yield spec["selector"]
    if made["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]
        for way in ("ingress", "egress"):
            for rule in spec.get(way, ()):
                for peer in [*rule.get("from", ()), *rule.get("to", ())]:
                    yield from _peer(peer)
    elif made["kind"] in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        yield spec["selector"]["matchLabels"]


def _peer(peer: Object) -> Iterator[dict[str, str]]:
    for expression in peer.get("podSelector", {}).get("matchExpressions", ()):
        for value in expression["values"]:
            yield {**peer["podSelector"].get("matchLabels", {}), expression["key"]: value}


def _selected(copy: Rendered, other: Rendered) -> list[str]:
    """Pods of the other copy that a selector of the first one matches."""
    labels = {pod: template["metadata"]["labels"] for pod, template in other.templates().items()}
    return [
        f"{made['kind']}/{made['metadata']['name']} selects {pod}"
        for made in copy.objects
        for wanted in _selectors(made)
        for pod, has in labels.items()
        if wanted.items() <= has.items()
    ]


def _parts(whole: Rendered, aliases: tuple[str, ...]) -> list[Rendered]:
    return [
        Rendered(
            {},
            tuple(
                one
                for name, text in whole.texts.items()
                if f"/charts/{alias}/" in name and not name.endswith("NOTES.txt")
                for one in objects_in(text)
            ),
        )
        for alias in aliases
    ]


@pytest.mark.parametrize(
    ("release", "more"),
    [
        ("up", {}),
        ("chat", {}),
        ("a-release-with-a-name-as-long-as-helm-takes-it-53-abc", {}),
        ("up", {"chat": {"nameOverride": "llm", "fullnameOverride": "c"}, "code": {"nameOverride": "llm"}}),
        ("up", {"chat": {"fullnameOverride": "one"}, "code": {"fullnameOverride": "two"}}),
        ("up", {alias: {"topology": "split"} for alias in ("chat", "code")}),
        ("up", {alias: {"ray": {"enabled": True}} for alias in ("chat", "code")}),
    ],
)
def test_two_copies_in_one_release_never_meet(tmp_path: Path, release: str, more: Values) -> None:
    aliases = ("chat", "code")
    values: Values = {
        alias: {**CPU, "prefill": {"gpu": {"count": 0}}, **more.get(alias, {})} for alias in aliases
    }
    for alias in aliases:
        values[alias]["decode"] = {"gpu": {"count": 0}}
    whole = render_umbrella(make_umbrella(tmp_path / "up", aliases), values, release)
    names = [(made["kind"], made["metadata"]["name"]) for made in whole.objects]
    assert len(set(names)) == len(names)
    first, second = _parts(whole, aliases)
    assert first.pods()
    assert second.pods()
    assert _selected(first, second) == _selected(second, first) == []
    assert (
        len({(made["metadata"]["name"], made["kind"]) for made in first.objects if made["kind"] == "Secret"})
        == 2
    )


@pytest.mark.parametrize(
    "copies",
    [
        (("one", {}), ("two", {})),
        (("one", {"nameOverride": "x"}), ("two", {"nameOverride": "x"})),
        (("demo", {"nameOverride": "a"}), ("demo-2", {"nameOverride": "a"})),
        (("demo", {"nameOverride": "baton-2"}), ("demo", {})),
        (("demo", {"fullnameOverride": "a"}), ("demo", {"fullnameOverride": "b"})),
        (("demo", {"commonLabels": {"app.kubernetes.io/name": "x"}}), ("other", {})),
        (
            ("demo", {}),
            ("other", {"commonLabels": {"baton/prefix": "demo-baton", "baton/cluster": "demo-baton"}}),
        ),
        (("other", {"pod": {"labels": {"app.kubernetes.io/instance": "demo"}}}), ("demo", {})),
    ],
)
def test_two_releases_in_one_namespace_never_meet(copies: Any) -> None:
    rendered = [_render(values, release) for release, values in copies]
    for one, other in itertools.permutations(rendered):
        assert _selected(one, other) == []
        for made in one.of_kind("Deployment").values():
            labels = made["spec"]["template"]["metadata"]["labels"]
            assert made["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_part_can_be_switched_off(tmp_path: Path) -> None:
    folder = make_umbrella(tmp_path / "up", ("chat", "code"))
    whole = render_umbrella(folder, {"chat": {"enabled": False}, "code": {"enabled": True}})
    assert whole.objects
    assert all("up-code" in made["metadata"]["name"] for made in whole.objects)
    assert _render({"enabled": False}).objects == ()
    with pytest.raises(HelmError, match="enabled"):
        _render({"enabled": "no"})


def test_global_registry_secrets_and_storage_class_are_used(tmp_path: Path) -> None:
    shared = {
        "imageRegistry": "mirror.example.com:5000",
        "imagePullSecrets": [{"name": "one"}, "two"],
        "storageClass": "fast",
        "of-another-chart": 1,
    }
    part = {**CPU, "image": {"pullSecrets": ["two", {"name": "three"}]}}
    folder = make_umbrella(tmp_path / "up", ("chat",))
    whole = render_umbrella(folder, {"global": shared, "chat": part})
    for spec in whole.pods().values():
        assert spec["imagePullSecrets"] == [{"name": "two"}, {"name": "three"}, {"name": "one"}]
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["image"].startswith("mirror.example.com:5000/")
    images = {spec["containers"][0]["image"] for spec in whole.pods().values()}
    assert "mirror.example.com:5000/valkey/valkey:8.1-alpine" in images
    assert any(image.startswith("mirror.example.com:5000/baton-serve/baton-router:") for image in images)


def _same_but_for_names(plain: Any, odd: Any, path: str) -> Iterator[str]:
    """Differences of two renders beyond names: places where one of them has something else than a text."""
    if type(plain) is not type(odd):
        yield f"{path}: {plain!r} became {odd!r}"
    elif isinstance(plain, dict):
        yield from (f"{path}: keys {key!r}" for key in odd if not isinstance(key, str))
        for one, other in zip(plain.values(), odd.values(), strict=True):
            yield from _same_but_for_names(one, other, f"{path}/…")
    elif isinstance(plain, list):
        for one, other in zip(plain, odd, strict=True):
            yield from _same_but_for_names(one, other, f"{path}[]")


def _odd_names() -> Iterator[Any]:
    yield from itertools.product(("kuberay-production", "split"), ODD)
    for pair in itertools.product(CASES, (*ODD, *MORE_ODD)):
        yield pytest.param(*pair, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "odd"), [*_odd_names()])
def test_names_stay_texts_whatever_they_are(name: str, odd: str) -> None:
    values = values_of(name)
    # A prefix of objects is at its worst where nothing of the chart's own stands beside it.
    start = odd if odd[0].isalpha() else ""
    plain, strange = (values | {"fullnameOverride": prefix} for prefix in ("plain" if start else "", start))
    release = odd.replace("o17", "17") if start else odd
    expected = _render(plain, "plain", "plain").objects
    found = _render(strange, release, odd.replace(".", "-")).objects
    assert [one["kind"] for one in found] == [one["kind"] for one in expected]
    wrong = [
        problem
        for one, other in zip(expected, found, strict=True)
        for problem in _same_but_for_names(_sorted(one), _sorted(other), f"{one['kind']}")
    ]
    assert wrong == []


def _sorted(made: Object) -> Object:
    """An object without the parts whose keys are names."""
    return {key: value for key, value in made.items() if key not in ("data", "stringData")}


# Values that name an object of the cluster, and labels.
NAMES = (
    ("default", "commonLabels"),
    ("model-pvc", "model.pvc.claimName"),
    ("model-hub", "model.hub.existingSecret"),
    ("production", "secrets.existingSecret"),
    ("production", "redis.existingSecret"),
    ("production", "auth.existingSecret"),
    ("production", "tls.public.issuerRef.name"),
    ("tls-own", "tls.public.existingSecret"),
    ("outside", "ingress.className"),
    ("outside", "ingress.tlsSecret"),
    ("placement", "serviceAccount.name"),
    ("scaling", "keda.authenticationRef"),
    ("default", "pod.priorityClassName"),
    ("default", "pod.nodeSelector"),
    ("default", "commonAnnotations"),
)


@pytest.mark.parametrize("odd", ["123", pytest.param("null", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "path"), [*NAMES[:4], *(pytest.param(*more, marks=pytest.mark.slow) for more in NAMES[4:])]
)
def test_names_of_users_stay_texts(name: str, path: str, odd: str) -> None:
    def rendered(word: str) -> tuple[Object, ...]:
        values = values_of(name)
        mapped = path.endswith(("Selector", "Labels", "Annotations"))
        put(values, path, {"key": word} if mapped else word)
        return _render(values).objects

    wrong = [
        problem
        for one, other in zip(rendered("plain"), rendered(odd), strict=True)
        for problem in _same_but_for_names(one, other, one["kind"])
    ]
    assert wrong == []


@pytest.mark.parametrize("release", ["123", "9lives", "my.release", "a.b"])
def test_names_of_services_are_what_kubernetes_takes(release: str) -> None:
    for name in _render({}, release).of_kind("Service"):
        assert name[0].isalpha()
        assert "." not in name
        assert len(name) <= 63


@pytest.mark.parametrize("name", CASES)
def test_selecting_labels_are_on_every_pod(name: str) -> None:
    for template in case(name).templates().values():
        assert {"baton/prefix", "baton/cluster"} <= set(template["metadata"]["labels"])
