"""`python -m services.router.tokenization.helper_process`: tokenises large requests for its parent router.

stdin is a socket (see `helper_frames`). The first frame configures the process and is answered once the
tokenizer is loaded. Each later frame is a job, answered in order. The process ends when the socket is closed
or the thread that started it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from baton.base.errors import BatonError, ErrorKind, FieldError
from services.router.request.validate import RequestLimits
from services.router.text.model_info import ModelInfo
from services.router.text.tokenizer import ModelTokenizer
from services.router.tokenization.helper_frames import receive_frame, send_frame
from services.router.tokenization.helper_jobs import JOBS

# Above the router's: out of memory, the kernel kills this process first.
_OOM_SCORE = 500
_NICENESS = 5
# After a job of more bytes, free memory is returned to the kernel.
_LARGE_JOB_BYTES = 1024 * 1024
_STATUS_PAGES = Path("/proc/self/statm")


def main(peer: socket.socket) -> None:
    """Serves until the peer closes the socket."""
    with contextlib.suppress(EOFError, OSError):
        settings, _ = receive_frame(peer)
        folder = Path(settings["folder"])
        bytes_only = settings["bytes_only"]
        info = ModelInfo.load(folder, byte_tokenizer=bytes_only)
        tokenizer = ModelTokenizer(folder, info, bytes_only=bytes_only)
        _limit_memory(settings["memory_bytes"])
        send_frame(peer, {})
        while True:
            job, parts = receive_frame(peer)
            header, answer = _run(tokenizer, job, parts)
            send_frame(peer, header, answer)
            if sum(map(len, parts)) > _LARGE_JOB_BYTES:
                del parts, answer
                _trim_memory()


def _run(
    tokenizer: ModelTokenizer, job: dict[str, Any], parts: list[bytearray]
) -> tuple[dict[str, Any], list[bytes]]:
    """Runs a job. Returns the header of the answer, with the error if there is one, and its parts."""
    try:
        limits = RequestLimits(**{**job["limits"], "eos_token_ids": tuple(job["limits"]["eos_token_ids"])})
        return {}, JOBS[job["job"]](tokenizer, limits, *map(bytes, parts), **job.get("options", {}))
    except BatonError as error:
        failure = error
    except MemoryError:
        failure = BatonError(ErrorKind.INVALID, "this request takes more memory than the router allows")
    except Exception as error:
        # Only the place: values may be part of a prompt.
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"tokenizer helper: {type(error).__name__} at {where.filename}:{where.lineno}", file=sys.stderr)
        failure = BatonError(ErrorKind.INTERNAL, f"the router failed: {type(error).__name__}")
    field = {"param": failure.param, "code": failure.code} if isinstance(failure, FieldError) else None
    return {"error": {"kind": failure.kind.name, "message": failure.message, "field": field}}, []


def _limit_memory(more_bytes: int) -> None:
    """Limits the address space to `more_bytes` above its present size; allocations above that fail."""
    now = int(_STATUS_PAGES.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = now + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _trim_memory() -> None:
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _lower_priority() -> None:
    """Gives the router precedence for CPU and memory."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router ends this process
    _lower_priority()
    main(socket.socket(fileno=os.dup(sys.stdin.fileno())))
