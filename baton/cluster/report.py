"""What is known of one worker: said by its home, kept by the supervisor, read by `baton up`."""

from __future__ import annotations

from enum import StrEnum

from baton.errors import BatonError, ErrorKind
from services.common.config.strict_model import StrictModel


class Phase(StrEnum):
    """Where a worker stands. The homes of workers say all but the first and the last."""

    MISSING = "missing"  # it has no home, or its home was lost and the process with it
    EMPTY = "empty"  # a home in which no process was started yet
    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"  # its process is gone, or never became one
    UNKNOWN = "unknown"  # its home does not answer


class Failure(StrictModel):
    """Why a process ended or never served: an `ErrorKind`'s name, and one line."""

    kind: str
    message: str

    @property
    def refused(self) -> bool:
        """The process refused its configuration or what that names, such as the model's files. An immediate
        second start would fail alike; a later one may not."""
        return ErrorKind[self.kind] is ErrorKind.INVALID

    @property
    def replaced(self) -> bool:
        """A newer start of the same worker elsewhere has its name; another start would take it back."""
        return ErrorKind[self.kind] is ErrorKind.CONFLICT

    def error(self) -> BatonError:
        return BatonError(ErrorKind[self.kind], self.message)


class Report(StrictModel):
    """One worker."""

    phase: Phase
    starts: int = 0  # processes started so far
    silent_s: float = 0.0  # since it last answered; 0 unless it serves
    address: str = ""  # host:port of its gRPC front, once it served
    incarnation: str = ""  # 32 hex digits
    front_pid: int = 0
    engine_pid: int = 0
    node: str = ""  # Ray's id of its host; empty without Ray
    device_index: int | None = None
    failure: Failure | None = None


class WorkerStatus(StrictModel):
    """One wanted worker, by name."""

    name: str
    role: str
    report: Report

    @property
    def restarts(self) -> int:
        return max(0, self.report.starts - 1)


class ClusterStatus(StrictModel):
    """All wanted workers. `settled` once each of them was heard of: before, no news is no bad news."""

    settled: bool
    workers: tuple[WorkerStatus, ...]

    @property
    def serving(self) -> bool:
        """Every worker serves, and is known."""
        reports = [worker.report for worker in self.workers]
        return self.settled and all(r.phase is Phase.SERVING and r.incarnation for r in reports)

    @property
    def addresses(self) -> list[str]:
        """Where workers serve, as far as is known."""
        here = (Phase.SERVING, Phase.UNKNOWN)
        return [w.report.address for w in self.workers if w.report.phase in here and w.report.address]

    @property
    def failure(self) -> Failure | None:
        """The first worker's that has one."""
        return next((w.report.failure for w in self.workers if w.report.failure), None)
