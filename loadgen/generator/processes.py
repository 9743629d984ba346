"""Starts the processes of a run, gives them a common start time, monitors them and collects their records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.base.python_module import python_module
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Measured, Record
from loadgen.common.settings import Settings

# A process generates its prompts before it is ready; long ones take time.
READY_S = 300.0
# Time from the start message to the first send, so that every process has received it.
_AHEAD_S = 0.2
_LONGEST_LINE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the whole run, all processes together."""

    elapsed_s: float
    sent: int
    ended: int
    failed: int
    good: int
    cancelled: int
    tokens: int
    # The maximum since the last report.
    lag_ms: float
    # Conversations that are due, sent or not; 0 in a closed loop.
    due: int = 0

    @property
    def in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return self.sent - self.ended


@dataclass(slots=True)
class _Member:
    process: asyncio.subprocess.Process
    part: Path
    progress: dict[str, float] = field(default_factory=dict)
    done: dict[str, Any] | None = None


Watch = Callable[[Progress], bool]


async def measure(settings: Settings, folder: Path, watch: Watch) -> Measured:
    """Runs a load in several processes. `watch` is called four times per second with the progress; a run for
    which it returns False is stopped.

    Parts of the raw record are written to `folder` during the run. Raises LoadgenError where the target does
    not answer or a process dies.
    """
    processes = RunProcesses(settings, folder)
    try:
        await processes.start()
        return await processes.run(watch)
    finally:
        await processes.end()


class RunProcesses:
    """The processes of one run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._members: list[_Member] = []

    async def start(self) -> None:
        """Starts all processes and returns when each is ready to send."""
        count = self._settings.generator.processes
        for number in range(count):
            part = self._folder / f"part-{number}.jsonl"
            process = await asyncio.create_subprocess_exec(
                *python_module("loadgen.generator.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
                # Ctrl-C must reach this process only. No preexec_fn: gRPC has threads in this process.
                start_new_session=True,
            )
            member = _Member(process, part)
            self._members.append(member)
            assignment = {
                "settings": self._settings.model_dump(mode="json"),
                "process": number,
                "of": count,
                "records": str(part),
            }
            await self._send(member, assignment)
        try:
            async with asyncio.timeout(READY_S):
                for member in self._members:
                    await self._receive(member)
        except TimeoutError:
            raise LoadgenError("the generator's processes were not ready in time") from None

    async def run(self, watch: Watch) -> Measured:
        """Sends the start time and returns when every process is done."""
        start = time.monotonic() + _AHEAD_S
        started_at = time.time() + _AHEAD_S
        for member in self._members:
            await self._send(member, {"start": start})
        receiving = [asyncio.ensure_future(self._receive_all(member)) for member in self._members]
        stopped = False
        try:
            while not all(one.done() for one in receiving):
                await asyncio.wait(receiving, timeout=0.25, return_when=asyncio.FIRST_EXCEPTION)
                if not watch(self._progress(time.monotonic() - start)) and not stopped:
                    stopped = True
                    for member in self._members:
                        await self._send(member, {"stop": True})
            for one in receiving:
                one.result()
        finally:
            for one in receiving:
                one.cancel()
        records = await asyncio.to_thread(_read, [member.part for member in self._members])
        done = [member.done or {} for member in self._members]
        return Measured(records, started_at, start, done, stopped)

    async def end(self) -> None:
        """Kills remaining processes and removes partial records that were collected."""
        for member in self._members:
            if member.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    member.process.kill()
            await member.process.wait()
            if member.done is not None:
                member.part.unlink()

    def _progress(self, elapsed_s: float) -> Progress:
        reports = [member.progress for member in self._members]
        names = ("sent", "ended", "failed", "good", "cancelled", "tokens", "due")
        return Progress(
            elapsed_s=max(0.0, elapsed_s),
            lag_ms=max((one.get("lag_ms", 0.0) for one in reports), default=0.0),
            **{name: int(sum(one.get(name, 0) for one in reports)) for name in names},
        )

    async def _receive_all(self, member: _Member) -> None:
        while member.done is None:
            message = await self._receive(member)
            if "done" in message:
                member.done = message["done"]
            else:
                member.progress = message

    async def _receive(self, member: _Member) -> dict[str, Any]:
        assert member.process.stdout is not None
        line = await member.process.stdout.readline()
        if not line:
            code = await member.process.wait()
            raise LoadgenError(f"a process of the generator ended by itself (exit code {code})")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise LoadgenError(message["error"])
        return message

    @staticmethod
    async def _send(member: _Member, message: dict[str, Any]) -> None:
        assert member.process.stdin is not None
        member.process.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # a process that ended is noticed when it is read
            await member.process.stdin.drain()


def _read(parts: Iterable[Path]) -> list[Record]:
    records: list[Record] = []
    for part in parts:
        with part.open("rb") as lines:
            records += [Record.from_line(line) for line in lines]
    records.sort(key=lambda record: (record.scheduled, record.conversation, record.turn))
    return records
