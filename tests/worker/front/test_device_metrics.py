"""Metrics of a worker's devices: their memory by use, as far as it is known."""

from __future__ import annotations

from typing import Any

from baton.v1.worker_pb2 import DeviceMemory, IntegrityReport
from services.worker.front.metrics import REPORTED


def memory_of(report: IntegrityReport) -> dict[tuple[str, ...], Any]:
    (metric,) = [one for one in REPORTED if one.name == "baton_worker_device_memory_bytes"]
    assert metric.labels == ("device", "use")
    samples: Any = metric.read(report)
    return dict(samples)


def test_each_gpu_has_its_memory_by_use() -> None:
    first = DeviceMemory(index=5, weights_bytes=60, kv_bytes=20, used_bytes=95, total_bytes=140)
    second = DeviceMemory(index=1, weights_bytes=61, kv_bytes=20, used_bytes=96, total_bytes=140)
    assert memory_of(IntegrityReport(device_memory=[first, second])) == {
        ("5", "weights"): 60, ("5", "kv"): 20, ("5", "other"): 15, ("5", "free"): 45,
        ("1", "weights"): 61, ("1", "kv"): 20, ("1", "other"): 15, ("1", "free"): 44,
    }  # fmt: skip


def test_of_a_cpu_nothing_else_is_known() -> None:
    ranks = [DeviceMemory(index=rank, weights_bytes=7, kv_bytes=3) for rank in range(2)]
    assert memory_of(IntegrityReport(device_memory=ranks)) == {
        ("0", "weights"): 7, ("0", "kv"): 3, ("1", "weights"): 7, ("1", "kv"): 3,
    }  # fmt: skip
    assert memory_of(IntegrityReport()) == {}
