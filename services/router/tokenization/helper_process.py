"""`python -m services.router.tokenization.helper_process`: tokenises large requests for the router that
started it.

stdin is a socket (see `text_frames`). The first frame configures the process and is answered once the
tokenizer is loaded; after that each frame is a job and each is answered, in order. The process ends with the
socket, and with the thread that started it.
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

from baton.errors import BatonError, ErrorKind, FieldError
from services.router.request.served_model import Model
from services.router.text.model_info import ModelInfo
from services.router.text.tokenizer import ModelText
from services.router.tokenization.helper_frames import receive_frame, send_frame
from services.router.tokenization.helper_jobs import JOBS

# Above the router, which the kernel should rather keep, in the order of whom it kills for want of memory.
_OOM_SCORE = 500
_NICENESS = 5
# After a job of so many bytes, free memory goes back to the kernel.
_LARGE_JOB_BYTES = 1024 * 1024
_STATUS_PAGES = Path("/proc/self/statm")


def main(peer: socket.socket) -> None:
    """Serves until the peer closes the socket."""
    with contextlib.suppress(EOFError, OSError):
        settings, _ = receive_frame(peer)
        folder = Path(settings["folder"])
        bytes_only = settings["bytes_only"]
        info = ModelInfo.load(folder, byte_tokenizer=bytes_only)
        text = ModelText(folder, info, bytes_only=bytes_only)
        _limit_memory(settings["memory_bytes"])
        send_frame(peer, {})
        while True:
            job, parts = receive_frame(peer)
            header, answer = _run(text, job, parts)
            send_frame(peer, header, answer)
            if sum(map(len, parts)) > _LARGE_JOB_BYTES:
                del parts, answer
                _trim_memory()


def _run(text: ModelText, job: dict[str, Any], parts: list[bytearray]) -> tuple[dict[str, Any], list[bytes]]:
    """The answer's header, with the error if there is one, and its parts."""
    try:
        model = Model(**{**job["model"], "eos": tuple(job["model"]["eos"])})
        return {}, JOBS[job["job"]](text, model, *map(bytes, parts), **job.get("options", {}))
    except BatonError as error:
        return {"error": _worded(error)}, []
    except MemoryError:
        message = "this request takes more memory than the router allows"
        return {"error": _worded(BatonError(ErrorKind.INVALID, message))}, []
    except Exception as error:
        # The traceback has no values: prompts are not logged.
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"text process: {type(error).__name__} at {where.filename}:{where.lineno}", file=sys.stderr)
        message = f"the router failed: {type(error).__name__}"
        return {"error": _worded(BatonError(ErrorKind.INTERNAL, message))}, []


def _worded(error: BatonError) -> dict[str, Any]:
    field = {"param": error.param, "code": error.code} if isinstance(error, FieldError) else None
    return {"kind": error.kind.name, "message": error.message, "field": field}


def _limit_memory(more_bytes: int) -> None:
    """So many bytes above what this process has now; an allocation above that fails."""
    now = int(_STATUS_PAGES.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = now + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _trim_memory() -> None:
    with contextlib.suppress(AttributeError):  # of another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def _be_modest() -> None:
    """The router's own streams go first, for the processor and for memory."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router decides
    _be_modest()
    main(socket.socket(fileno=os.dup(sys.stdin.fileno())))
