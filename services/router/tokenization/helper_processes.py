"""The router's side of its text processes: each has a thread that sends it one job at a time and waits.

Two processes, both started with the first job for them: one for requests of up to a megabyte, one for larger
ones, which can take seconds, so that these delay each other and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from baton.errors import BatonError, ErrorKind, FieldError
from baton.parent_death import tied
from services.common.observability.logs import get_log
from services.router.tokenization.helper_frames import receive_frame, send_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.router.request.served_model import Model

_MODULE = "services.router.tokenization.helper_process"
# Until the tokenizer is loaded, of one job, and of a job with its wait for others.
START_S = 30.0
JOB_S = 10.0
WAIT_S = 30.0
# Jobs that wait for a process, and their bytes, unless a single one has more.
MAX_JOBS = 64
MAX_WAITING_BYTES = 64 * 1024 * 1024
# Jobs for the process of large requests.
LARGE_JOB_BYTES = 1024 * 1024
# Memory of a process above what it has when it is loaded. A byte of text takes up to 140 bytes.
_MEMORY_BYTES = 512 * 1024 * 1024
_MEMORY_PER_BYTE = 192

_log = get_log("router")


@dataclass(frozen=True)
class HelperSettings:
    """What a text process needs to know: the model's folder, whether a token is a byte, the largest job."""

    folder: str
    bytes_only: bool
    max_job_bytes: int

    def frame(self) -> dict[str, Any]:
        """The process's first frame."""
        memory = _MEMORY_BYTES + _MEMORY_PER_BYTE * self.max_job_bytes
        return {"folder": self.folder, "bytes_only": self.bytes_only, "memory_bytes": memory}


class TextProcesses:
    """Both processes. `run` from the event loop; `close` when no more jobs come."""

    def __init__(self, settings: HelperSettings) -> None:
        self._usual = TextProcess(settings)
        self._large = TextProcess(settings)

    async def run(
        self, job: str, model: Model, parts: Sequence[bytes | bytearray], **options: object
    ) -> list[bytearray]:
        """The parts of a job's answer (see `text_jobs`).

        Raises what the job raises; BatonError(OVERLOADED) where too many wait, INVALID where this one takes
        too long, INTERNAL where the process died of it.
        """
        process = self._large if sum(map(len, parts)) > LARGE_JOB_BYTES else self._usual
        return await process.run({"job": job, "model": asdict(model), "options": options}, parts)

    def close(self) -> None:
        """Kills the processes; running jobs fail."""
        self._usual.close()
        self._large.close()


class TextProcess:
    """One process, started when it is needed and again after it died."""

    def __init__(self, settings: HelperSettings, job_s: float = JOB_S) -> None:
        self._settings = settings
        self._job_s = job_s
        # The thread outlives the process, which is killed with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text-process")
        self._waiting = 0
        self._waiting_bytes = 0
        # Guards the process and its socket against `close`; held for moments only.
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None else None

    async def run(self, header: dict[str, Any], parts: Sequence[bytes | bytearray]) -> list[bytearray]:
        """See `TextProcesses.run`."""
        size = sum(map(len, parts))
        full = self._waiting_bytes + size > MAX_WAITING_BYTES and self._waiting
        if full or self._waiting >= MAX_JOBS:
            raise BatonError(ErrorKind.OVERLOADED, f"{self._waiting} large requests wait to be tokenised")
        self._waiting += 1
        self._waiting_bytes += size
        try:
            async with asyncio.timeout(WAIT_S):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self._exchange, header, parts)
        except TimeoutError:
            message = f"the request was not tokenised within {WAIT_S:g} s: too many large ones come"
            raise BatonError(ErrorKind.OVERLOADED, message) from None
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    def close(self) -> None:
        """Kills the process; a running job fails. Returns when the process is gone."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    def _exchange(self, header: dict[str, Any], parts: Sequence[bytes | bytearray]) -> list[bytearray]:
        """Sends a job and receives its answer; in the thread."""
        peer = self._running()
        deadline = time.monotonic() + self._job_s
        try:
            send_frame(peer, header, parts, deadline)
            answer, results = receive_frame(peer, deadline)
        except TimeoutError:
            self._end()
            message = f"the request takes more than {self._job_s:g} s to tokenise"
            raise BatonError(ErrorKind.INVALID, message) from None
        except (EOFError, OSError):
            raise self._death("the request could not be tokenised") from None
        if "error" in answer:
            raise _error(answer["error"])
        return results

    def _running(self) -> socket.socket:
        """The socket of the process, started if need be."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._socket is None:
            self._socket = self._start()
            try:
                deadline = time.monotonic() + START_S
                send_frame(self._socket, self._settings.frame(), (), deadline)
                receive_frame(self._socket, deadline)
            except (EOFError, OSError):  # TimeoutError is one
                raise self._death("the router's text process does not start") from None
        return self._socket

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._closed:
                ours.close()
                raise BatonError(ErrorKind.UNAVAILABLE, "the router stops")
            self._process = subprocess.Popen(
                tied([sys.executable, "-m", _MODULE]),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        return ours

    def _death(self, message: str) -> BatonError:
        """Ends what is left of a process that died, and says so in the log."""
        status = self._end()
        _log.warning("text_process_died", status=status)
        return BatonError(ErrorKind.INTERNAL, message)

    def _end(self) -> int | None:
        """Kills and reaps the process, if there is one; its exit status."""
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


def _error(worded: dict[str, Any]) -> BatonError:
    kind, field = ErrorKind[worded["kind"]], worded["field"]
    if field is None:
        return BatonError(kind, worded["message"])
    return FieldError(worded["message"], param=field["param"], code=field["code"], kind=kind)
