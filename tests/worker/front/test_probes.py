"""A worker's health and readiness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.common.config.tls import InternalTls
from services.common.processes.drain import Drain
from services.worker.front.probes import WorkerProbes

TLS = InternalTls.model_validate({"cert_file": "c", "key_file": "k", "ca_file": "a", "domain": "d"})


def probes_of(*, registered: bool = True, away: bool = False, canary: str | None = None) -> WorkerProbes:
    registration: Any = SimpleNamespace(registered=registered, state=SimpleNamespace(unavailable=away))
    return WorkerProbes(Drain(), registration, SimpleNamespace(failure=canary), loaded=True)  # type: ignore[arg-type]


def test_a_worker_starts_until_its_model_is_loaded() -> None:
    probes = WorkerProbes(Drain(), None, None)
    assert (probes.unhealthy(), probes.unready()) == ("starting", "starting")
    probes.loaded = True
    assert (probes.unhealthy(), probes.unready()) == (None, None)


def test_readiness_follows_lease_and_canary() -> None:
    assert probes_of().unready() is None
    assert probes_of(registered=False).unready() == "the registry does not list the worker"
    assert probes_of(registered=False, away=True).unready() is None, "its lease counts as alive"
    assert probes_of(canary="it failed").unready() == "it failed"


def test_a_hung_engine_is_neither_healthy_nor_ready() -> None:
    probes = probes_of()
    probes.hung = "the engine made no progress for 3.0 s"
    assert (probes.unhealthy(), probes.unready()) == (probes.hung, probes.hung)


def test_a_draining_worker_is_healthy_and_not_ready() -> None:
    probes = probes_of()
    probes.drain.started = True
    assert (probes.unhealthy(), probes.unready()) == (None, "the worker is draining")
