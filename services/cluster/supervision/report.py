"""The state of a worker, as its process host reports it, the supervisor keeps it and `baton up` reads it."""

from __future__ import annotations

from enum import StrEnum

from baton.base.errors import BatonError, ErrorKind
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
    """The reason why a process ended or never served: the name of an `ErrorKind`, and one line of text."""

    kind: str
    message: str

    @property
    def refused(self) -> bool:
        """True if the process refused its configuration, or files that it names. An immediate restart would
        fail again; a later one may succeed."""
        return ErrorKind[self.kind] is ErrorKind.INVALID

    @property
    def replaced(self) -> bool:
        """True if a newer start of the same worker elsewhere has its name; a restart would take it back."""
        return ErrorKind[self.kind] is ErrorKind.CONFLICT

    def error(self) -> BatonError:
        return BatonError(ErrorKind[self.kind], self.message)


class Report(StrictModel):
    """State of one worker's process."""

    phase: Phase
    starts: int = 0  # processes started so far
    silent_s: float = 0.0  # since its last answer; 0 unless it serves
    ran_s: float = 0.0  # seconds of these in which its front could run
    address: str = ""  # host:port of its gRPC front, once it served
    unready: str = ""  # why it should get no new work, by its own last answer
    incarnation: str = ""  # 32 hex digits
    front_pid: int = 0
    engine_pid: int = 0
    node: str = ""  # Ray's id of its host; empty without Ray
    device_indexes: tuple[int, ...] = ()
    place: int = 0  # among the workers of its host; its ports count from it
    digest: str = ""  # of the configuration that a detached worker has
    stopping: bool = False  # its Ray node is about to end
    failure: Failure | None = None


class ClusterStatus(StrictModel):
    """The last report of every wanted worker, by name. `complete`: True once each has reported; until then a
    missing worker may be running."""

    complete: bool
    reports: dict[str, Report]

    @property
    def serving(self) -> bool:
        """True if every worker serves and has reported its incarnation."""
        serving = (one.phase is Phase.SERVING and one.incarnation for one in self.reports.values())
        return self.complete and all(serving)

    @property
    def addresses(self) -> list[str]:
        """host:port of every worker that serves, as far as is known."""
        here = (Phase.SERVING, Phase.UNKNOWN)
        return [one.address for one in self.reports.values() if one.phase in here and one.address]

    @property
    def failure(self) -> Failure | None:
        """The failure of the first worker that has one."""
        return next((one.failure for one in self.reports.values() if one.failure), None)
