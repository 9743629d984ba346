"""Health and readiness of a group of workers, from the latest reports of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.cluster.supervision.report import ClusterStatus, Phase, Report
from services.common.config.types import Role
from services.common.config.worker import WorkerConfig

STARTING = "starting"


class GroupProbes:
    """Answers the probes of a group; `update` gives it the workers' state, `drain` ends its readiness."""

    def __init__(self, workers: Sequence[WorkerConfig]) -> None:
        self._roles: dict[str, Role] = {worker.name: worker.role for worker in workers}
        self._reports: Mapping[str, Report] = {}
        # Workers that have served at least once.
        self._loaded: set[str] = set()
        self._draining = False

    @property
    def reports(self) -> Mapping[str, Report]:
        """The latest report of each worker, by name."""
        return self._reports

    def update(self, status: ClusterStatus) -> None:
        """Takes over the workers' latest reports."""
        self._reports = status.reports
        self._loaded |= {name for name, report in status.reports.items() if report.phase is Phase.SERVING}

    def drain(self) -> None:
        """Ends the group's readiness: no worker gets new work from now on."""
        self._draining = True

    def ready(self, name: str) -> bool:
        """True if that worker serves and is ready itself."""
        report = self._reports.get(name)
        if report is None or report.phase is not Phase.SERVING:
            return False
        return bool(report.incarnation) and not report.unready

    def unhealthy(self) -> str | None:
        """Returns "starting" until every worker has been loaded once; from then on it is this process's own
        task to end and restart workers."""
        return STARTING if self._loaded < self._roles.keys() and not self._draining else None

    def unready(self) -> str | None:
        """Says why the group cannot serve requests: a role without any ready worker."""
        if self._draining:
            return "the group is draining"
        for role in dict.fromkeys(self._roles.values()):
            names = [name for name, its_role in self._roles.items() if its_role == role]
            if not any(map(self.ready, names)):
                reasons = "; ".join(f"{name}: {self._reason(name)}" for name in names)
                return f"no {role} worker is ready ({reasons})"
        return None

    def _reason(self, name: str) -> str:
        report = self._reports.get(name)
        if report is None:
            return Phase.MISSING.value
        return (report.phase is Phase.SERVING and report.unready) or report.phase.value
