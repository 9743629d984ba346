"""Health and readiness of a group follow the reports of its workers."""

from __future__ import annotations

from prometheus_client import generate_latest

from services.cluster.group.metrics import group_registry
from services.cluster.group.probes import GroupProbes
from services.cluster.supervision.report import ClusterStatus, Phase, Report
from services.common.config.worker import WorkerConfig

WORKERS = [WorkerConfig(name=f"{role}-0", role=role, model="m") for role in ("prefill", "decode")]
WORKERS.append(WorkerConfig(name="decode-1", role="decode", model="m"))


def serving(unready: str = "", starts: int = 1) -> Report:
    return Report(phase=Phase.SERVING, incarnation="ab", unready=unready, starts=starts)


def probes_of(**reports: Report) -> GroupProbes:
    probes = GroupProbes(WORKERS)
    add(probes, **reports)
    return probes


def add(probes: GroupProbes, **reports: Report) -> None:
    named = {name.replace("_", "-"): report for name, report in reports.items()}
    missing = {one.name: Report(phase=Phase.MISSING) for one in WORKERS}
    probes.update(ClusterStatus(complete=True, reports=missing | named))


def test_it_starts_until_every_worker_has_been_loaded_once() -> None:
    probes = GroupProbes(WORKERS)
    assert probes.unhealthy() == "starting"
    add(probes, prefill_0=serving(), decode_0=serving())
    assert probes.unhealthy() == "starting"
    add(probes, decode_1=serving())
    assert probes.unhealthy() is None
    add(probes, prefill_0=Report(phase=Phase.ENDED))
    assert probes.unhealthy() is None, "it restarts that worker by itself"


def test_ready_with_one_worker_of_each_role() -> None:
    probes = probes_of(prefill_0=serving(), decode_1=serving())
    assert probes.unready() is None
    probes.drain()
    assert probes.unready() == "the group is draining"


def test_the_reason_names_the_role_and_what_its_workers_say() -> None:
    probes = probes_of(
        prefill_0=serving(),
        decode_0=serving("a canary generation failed: x"),
        decode_1=Report(phase=Phase.ENDED),
    )
    reason = "decode-0: a canary generation failed: x; decode-1: ended"
    assert probes.unready() == f"no decode worker is ready ({reason})"


def test_a_worker_that_has_not_answered_yet_is_not_ready() -> None:
    probes = probes_of(prefill_0=Report(phase=Phase.SERVING), decode_0=serving())
    assert not probes.ready("prefill-0")


def test_metrics_count_restarts_and_readiness() -> None:
    probes = probes_of(prefill_0=serving(starts=3), decode_0=serving("draining"))
    text = generate_latest(group_registry("pod", "chat", probes)).decode()
    assert 'restarts_total{group="pod",model="chat",worker="prefill-0"} 2.0' in text
    assert 'restarts_total{group="pod",model="chat",worker="decode-1"} 0.0' in text
    assert 'baton_group_worker_ready{group="pod",model="chat",worker="decode-0"} 0.0' in text
    assert "process_cpu_seconds_total" in text
