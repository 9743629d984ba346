"""The leak check after a run: whether the server has released everything. A slot that a cancelled request
keeps is leaked."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from baton.v1.admin_pb2 import AdminServiceGetStatusResponse
from baton.v1.worker_pb2 import IntegrityReport
from loadgen.common.settings import TargetSettings
from loadgen.targets.admin_port import AdminPort, NoAdminError

# A router promises 1 s; a busy machine gets more.
LIMIT_S = 5.0
_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class LeakCheck:
    """Resources still in use after the run; None, with the reason, if they were not checked."""

    held: list[str] | None
    not_checked: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The result as `about.json` stores it."""
        return {"leaks": self.held, "leaks_not_checked": self.not_checked}


async def check_leaks(target: TargetSettings) -> LeakCheck:
    """Polls until nothing is in use or LIMIT_S have passed. Never raises."""
    until = time.monotonic() + LIMIT_S
    async with AdminPort(target) as admin:
        while True:
            try:
                status = await admin.status(_ANSWER_S, check_integrity=True)
            except NoAdminError as error:
                return LeakCheck(None, str(error))
            found = judge(status)
            if found.held == [] or time.monotonic() > until:
                return found
            await asyncio.sleep(0.25)


def judge(status: AdminServiceGetStatusResponse) -> LeakCheck:
    """Lists the resources that router and workers have in use; not checked if a worker reports no
    counters."""
    held = [f"router: {status.router.running} requests run"] if status.router.running else []
    silent = [] if status.workers else ["no worker is known"]
    for one in status.workers:
        name = one.worker.identity.name or one.worker.address
        held += [f"{name}: {what}" for what in _held(one.worker.report)]
        if one.worker.error:
            silent.append(f"no counters of {name}: {one.worker.error}")
    return LeakCheck(None, silent[0]) if silent and not held else LeakCheck(held)


def _held(report: IntegrityReport) -> list[str]:
    counts = {
        "slots in use": report.load.slots - report.load.free_slots,
        "live tickets": report.live_tickets,
        "pinned blocks": report.pinned_blocks,
    }
    held = [f"{count} {what}" for what, count in counts.items() if count]
    return [*held, report.integrity_error] if report.integrity_error else held
