"""Statuses made by hand: clusters of any size, busy, slow or broken."""

from __future__ import annotations

from baton.v1 import admin_pb2, router_pb2, types_pb2, worker_pb2

READY = admin_pb2.WORKER_STATE_READY


def worker(
    name: str,
    role: types_pb2.WorkerRole.ValueType,
    *,
    step_ms: float = 5.0,
    slots: int = 16,
    active: int = 3,
    queued: int = 0,
    state: admin_pb2.WorkerState.ValueType = READY,
) -> admin_pb2.WorkerStatus:
    """A worker that had 100 steps within the last second."""
    recent = worker_pb2.RecentSteps(steps=100, tokens=1000, mean_ms=step_ms, p99_ms=step_ms * 2)
    states = [worker_pb2.SLOT_STATE_ACTIVE] * active + [worker_pb2.SLOT_STATE_RESERVED]
    states += [worker_pb2.SLOT_STATE_FREE] * (slots - len(states))
    status = admin_pb2.WorkerStatus(
        state=state,
        queued_tokens=queued,
        metrics_address="127.0.0.1:49100",
        pool="732d3b439372",
        weight_format="float32",
    )
    status.worker.address = "127.0.0.1:50001"
    status.worker.identity.name, status.worker.identity.role = name, role
    report = status.worker.report
    report.load.slots, report.load.free_slots = slots, slots - active - 1
    report.load.blocks, report.load.free_blocks = 4096, 1000
    report.kv_bytes, report.kv_dtype = 4096 << 20, "float8_e4m3fn"
    report.front_pid, report.engine_pid, report.devices = 1234567, 1234568, 2
    report.links.extend([worker_pb2.LinkReport()] * 12)
    report.slot_states.extend(states)
    if role != types_pb2.WORKER_ROLE_PREFILL:
        report.recent_decode.CopyFrom(recent)
        report.tokens_per_step, report.tokens_decoded, report.bytes_received = 1.94, 123456, 1000 << 20
    if role != types_pb2.WORKER_ROLE_DECODE:
        report.recent_prefill.CopyFrom(recent)
        report.prompts_run, report.bytes_shipped = 123456, 1000 << 20
    return status


def prefill(name: str, **fields: int | float) -> admin_pb2.WorkerStatus:
    return worker(name, types_pb2.WORKER_ROLE_PREFILL, **fields)  # type: ignore[arg-type]


def decode(name: str, **fields: int | float) -> admin_pb2.WorkerStatus:
    return worker(name, types_pb2.WORKER_ROLE_DECODE, **fields)  # type: ignore[arg-type]


def status(*workers: admin_pb2.WorkerStatus, serving: bool = True) -> admin_pb2.AdminServiceGetStatusResponse:
    """A cluster with figures as wide as they come."""
    router = router_pb2.RouterStatus(
        model="a-model-of-some-length",
        serving=serving,
        running=1024,
        waiting=1023,
        uptime_s=9000,
        window_s=60,
        requests_per_s=123.4,
        errors_per_s=0.5,
        prompt_tokens_per_s=123456.7,
        completion_tokens_per_s=98765.4,
        ttft=router_pb2.Latency(count=10, p50_ms=12345.6, p99_ms=99999.9),
        itl=router_pb2.Latency(count=10, p50_ms=0.05, p99_ms=7.25),
    )
    return admin_pb2.AdminServiceGetStatusResponse(
        router=router, workers=workers, grpc_address="127.0.0.1:50051", http_address="127.0.0.1:8000"
    )
