"""Values of several features together, chosen at random by a seed: each renders, repeats no merge key, and is
what Kubernetes accepts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helm_python import HelmError

from tests.deploy.chart import Values, put, render, values_of
from tests.deploy.kubernetes_schemas import NEWEST, errors_in
from tests.deploy.values.merge_keys import repeated

VERSIONS = ("1.28", "1.31", "1.36", NEWEST)
_QUICK, SEEDS = 1, 30

# Each has values by dotted path, of which at most one set is taken.
FEATURES: tuple[tuple[Values, ...], ...] = (
    ({"topology": "split"}, {"topology": "node"}),
    ({"ray.enabled": True}, {"kuberay.enabled": True}, {}),
    ({"fullnameOverride": "x"}, {"nameOverride": "y"}, {"global": {"imageRegistry": "m:5000"}}),
    ({"cluster": {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}}, {}),
    (
        {"monitoring.serviceMonitor.enabled": True, "monitoring.alerts.prometheusRule": True},
        {"monitoring.podMonitor.enabled": True, "monitoring.dashboards.enabled": True},
    ),
    ({"tls.internal.enabled": True, "tls.internal.certManager": True}, {}),
    ({"tls.public.enabled": True, "tls.public.existingSecret": "t"}, {}),
    (
        {"ingress.enabled": True, "ingress.className": "nginx", "ingress.hosts": ["a.b"]},
        {
            "gateway.parentRefs": [{"name": "g"}],
            "gateway.grpcRoute.enabled": True,
            "gateway.envoyGateway": "always",
        },
        {},
    ),
    ({"router.autoscaling.enabled": True}, {"router.replicas": 5}),
    (
        {f"{role}.autoscaling.enabled": True for role in ("workerGroup", "prefill", "decode")},
        {"decode.pdb.enabled": False},
    ),
    ({"kernelCache": {"type": "pvc", "claimSize": "1Gi"}}, {"kernelCache": {"type": "hostPath"}}),
    (
        {
            "model": {
                "source": "hub",
                "servedName": "1e3",
                "hub": {"id": "a/b", "cache": "pvc", "claimSize": "9Gi"},
            }
        },
        {"model": {"source": "pvc", "servedName": "m", "pvc": {"claimName": "123"}}},
    ),
    ({"pod.extraEnv": [{"name": "HOME", "value": 1}], "pod.hostNetwork": True}, {"pod.topologyKey": ""}),
    ({"overrides": {"Deployment": {"spec": {"minReadySeconds": 3}}}}, {"tracing.endpoint": "http://c:4318"}),
    ({"redis.existingSecret": "r", "redis.port": 6380}, {"redis.url": "redis://r.data:1234"}, {}),
)


def drawn_values(seed: int) -> Values:
    draw = random.Random(seed)
    while True:
        values = values_of("default")
        for choices in FEATURES:
            for path, value in draw.choice(choices).items():
                put(values, path, value)
        try:
            render(values)
        except HelmError:  # some do not fit each other, which other tests are about
            continue
        return values


@pytest.mark.parametrize(
    "seed", [*range(_QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(_QUICK, SEEDS))]
)
def test_features_together(seed: int) -> None:
    made = render(drawn_values(seed)).objects
    names = [(one["kind"], one["metadata"]["name"]) for one in made]
    assert len(set(names)) == len(names)
    wrong: list[Any] = [problem for one in made for problem in repeated(one)]
    wrong += [problem for version in VERSIONS for one in made for problem in errors_in(one, version)]
    assert wrong == []


def test_drawn_values_differ() -> None:
    drawn = [drawn_values(seed) for seed in range(3)]
    assert len({str(one) for one in drawn}) == 3
