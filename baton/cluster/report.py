"""The state of a worker, as its process host reports it, the supervisor keeps it and `baton up` reads it."""

from __future__ import annotations

from enum import StrEnum

from baton.errors import BatonError, ErrorKind
from services.common.config.types import StrictModel


class Phase(StrEnum):
    """The state of a worker's process."""

    MISSING = "missing"  # never started, or lost together with its actor
    EMPTY = "empty"  # no process was started yet
    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"  # the process has ended or could not be started
    UNKNOWN = "unknown"  # its actor does not answer


class Failure(StrictModel):
    """Why a process ended or never served: the name of an `ErrorKind`, and one line of text."""

    kind: str
    message: str

    @property
    def refused(self) -> bool:
        """Whether the process refused its configuration, or files that it names. An immediate restart would
        fail again; a later one may succeed."""
        return ErrorKind[self.kind] is ErrorKind.INVALID

    @property
    def replaced(self) -> bool:
        """Whether a newer start of the same worker elsewhere has its name; a restart would take it back."""
        return ErrorKind[self.kind] is ErrorKind.CONFLICT

    def error(self) -> BatonError:
        return BatonError(ErrorKind[self.kind], self.message)


class Report(StrictModel):
    """One worker's process."""

    phase: Phase
    starts: int = 0  # processes started so far
    silent_s: float = 0.0  # since its last answer; 0 unless it serves
    address: str = ""  # host:port of its gRPC front, once it served
    incarnation: str = ""  # 32 hex digits
    front_pid: int = 0
    engine_pid: int = 0
    node: str = ""  # Ray's id of its host; empty without Ray
    device_index: int | None = None
    failure: Failure | None = None


class WorkerStatus(StrictModel):
    """One wanted worker and its last report."""

    name: str
    role: str
    report: Report

    @property
    def restarts(self) -> int:
        return max(0, self.report.starts - 1)


class ClusterStatus(StrictModel):
    """All wanted workers. `settled` is True once each has reported; until then a missing worker may be
    running."""

    settled: bool
    workers: tuple[WorkerStatus, ...]

    @property
    def serving(self) -> bool:
        """Whether every worker serves and has reported its incarnation."""
        reports = [worker.report for worker in self.workers]
        return self.settled and all(r.phase is Phase.SERVING and r.incarnation for r in reports)

    @property
    def addresses(self) -> list[str]:
        """host:port of every worker that serves, as far as is known."""
        here = (Phase.SERVING, Phase.UNKNOWN)
        return [w.report.address for w in self.workers if w.report.phase in here and w.report.address]

    @property
    def failure(self) -> Failure | None:
        """The failure of the first worker that has one."""
        return next((w.report.failure for w in self.workers if w.report.failure), None)
