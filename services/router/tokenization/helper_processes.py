"""The router's side of its helper processes, which tokenise large requests.

There are two, each started with its first job: one for requests of up to 1 MiB and one for larger ones, which
can take seconds and thus delay only each other. A thread for each process sends one job at a time and waits;
the jobs of several tenants take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.base.parent_death import tied
from baton.base.process_watch import activity
from baton.base.python_module import python_module
from services.common.observability.logs import get_log
from services.router.request.validate import RequestLimits
from services.router.tenants.current import current_tenant
from services.router.tenants.places import Places
from services.router.tokenization.fair_threads import FairThreads
from services.router.tokenization.helper_frames import receive_frame, send_frame

_MODULE = "services.router.tokenization.helper_process"
# Timeouts: to load the tokenizer, for one job, and for a job including its time in the queue.
START_S = 30.0
JOB_S = 10.0
WAIT_S = 30.0
# Share of its time that a job must have had as processor time not to have been starved.
_OWN_SHARE = 0.8
# Jobs in a process's queue, and their bytes. A single job may have more.
MAX_JOBS = 64
MAX_WAITING_BYTES = 64 * 1024 * 1024
# Jobs above this size go to the process for large ones.
LARGE_JOB_BYTES = 1024 * 1024
# Memory of a process beyond what it has after loading. Tokenising takes up to 140 bytes for a byte of text.
_MEMORY_BYTES = 512 * 1024 * 1024
_MEMORY_PER_BYTE = 192

_PLACES = "tokenizer_places"

_log = get_log("router")


def helper_settings(folder: str, bytes_only: bool, max_job_bytes: int) -> dict[str, Any]:
    """The header of a helper process's first frame. `folder`: the model's. `bytes_only`: whether to use the
    byte tokenizer."""
    memory = _MEMORY_BYTES + _MEMORY_PER_BYTE * max_job_bytes
    return {"folder": folder, "bytes_only": bytes_only, "memory_bytes": memory}


class HelperProcesses:
    """The two processes. Call `run` on the event loop; `close` when no more jobs come."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings`: see `helper_settings`."""
        self._normal = HelperProcess(settings)
        self._large = HelperProcess(settings)

    @property
    def pids(self) -> list[int]:
        """Process ids of the helper processes that run."""
        return [one.pid for one in (self._normal, self._large) if one.pid is not None]

    async def run(
        self, job: str, limits: RequestLimits, parts: Sequence[bytes | bytearray], **options: object
    ) -> list[bytearray]:
        """Runs the job of this name, and returns the parts of its answer (see `helper_jobs`).

        Raises what the job raises; BatonError: OVERLOADED if too many wait, RATE_LIMITED if too many of
        the call's tenant do or the process is starved, INVALID if the job itself takes too long, INTERNAL if
        the process died.
        """
        process = self._large if sum(map(len, parts)) > LARGE_JOB_BYTES else self._normal
        return await process.run(
            {"job": job, "limits": asdict(limits.without_pairs()), "options": options}, parts
        )

    def close(self) -> None:
        """Kills both processes; running jobs fail."""
        self._normal.close()
        self._large.close()


class HelperProcess:
    """One process, started with its first job and again after it died."""

    def __init__(
        self,
        settings: dict[str, Any],
        job_s: float = JOB_S,
        wait_s: float = WAIT_S,
        max_jobs: int = MAX_JOBS,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._settings = settings
        self._job_s = job_s
        self._wait_s = wait_s
        # Lives longer than the process, which the kernel kills when the thread that started it ends.
        self._thread = FairThreads(1, "tokenizer-helper")
        self._jobs = Places(max_jobs, _PLACES, "large requests wait to be tokenised")
        self._bytes = Places(max_waiting_bytes, _PLACES, "bytes of requests wait to be tokenised")
        # Guards `_process` and `_socket` against `close`; never held while waiting.
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None while no process runs."""
        return self._process.pid if self._process is not None else None

    async def run(self, header: dict[str, Any], parts: Sequence[bytes | bytearray]) -> list[bytearray]:
        """Runs one job; see `HelperProcesses.run`."""
        tenant, size = current_tenant(), max(1, sum(map(len, parts)))
        with self._jobs.hold(tenant), self._bytes.hold(tenant, size):
            try:
                async with asyncio.timeout(self._wait_s):
                    return await self._thread.run(partial(self.exchange, header, parts), size)
            except TimeoutError:
                message = f"the request was not tokenised within {self._wait_s:g} s: too many large ones come"
                raise BatonError(ErrorKind.OVERLOADED, message) from None

    def close(self) -> None:
        """Kills the process and waits for its end; a running job fails."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.shutdown(wait=True)
        self._end()

    def exchange(self, header: dict[str, Any], parts: Sequence[bytes | bytearray]) -> list[bytearray]:
        """Sends a job and receives its answer. Blocks: `run` calls it in the process's thread."""
        peer = self._running()
        used_s = self._cpu_s()
        deadline = time.monotonic() + self._job_s
        try:
            send_frame(peer, header, parts, deadline)
            answer, results = receive_frame(peer, deadline)
        except TimeoutError:
            used_s = self._cpu_s() - used_s
            self._end()
            raise self._too_slow(used_s) from None
        except (EOFError, OSError):
            raise self._died("the request could not be tokenised") from None
        if "error" in answer:
            raise _error(answer["error"])
        return results

    def _running(self) -> socket.socket:
        """The socket of the process, which is started if necessary."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._socket is None:
            self._socket = self._start()
            try:
                deadline = time.monotonic() + START_S
                send_frame(self._socket, self._settings, (), deadline)
                receive_frame(self._socket, deadline)
            except (EOFError, OSError):  # TimeoutError is one
                raise self._died("the router's tokenizer helper does not start") from None
        return self._socket

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._closed:
                ours.close()
                raise BatonError(ErrorKind.UNAVAILABLE, "the router is stopping")
            self._process = subprocess.Popen(
                tied(python_module(_MODULE)),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        return ours

    def _cpu_s(self) -> float:
        """Processor time that the process has used."""
        seen = None if self._process is None else activity(self._process.pid)
        return 0.0 if seen is None else seen.cpu_s

    def _too_slow(self, used_s: float) -> BatonError:
        """The error of a job that took too long and used `used_s` of processor time: only where the process
        had nearly all of the time is it the request's."""
        if used_s >= _OWN_SHARE * self._job_s:
            message = f"the request takes more than {self._job_s:g} s to tokenise"
            return BatonError(ErrorKind.INVALID, message)
        message = f"the request was not tokenised within {self._job_s:g} s: the router's host is busy"
        return BatonError(ErrorKind.OVERLOADED, message)

    def _died(self, message: str) -> BatonError:
        """Cleans up after a process that died, and logs its exit status."""
        status = self._end()
        _log.warning("helper_process_died", status=status)
        return BatonError(ErrorKind.INTERNAL, message)

    def _end(self) -> int | None:
        """Kills and reaps the process, if there is one. Returns its exit status."""
        with self._lock:
            process, self._process = self._process, None
            peer, self._socket = self._socket, None
        if peer is not None:
            peer.close()
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return process.wait()


def _error(fields: dict[str, Any]) -> BatonError:
    kind, field = ErrorKind[fields["kind"]], fields["field"]
    if field is None:
        return BatonError(kind, fields["message"])
    return FieldError(fields["message"], kind=kind, **field)
