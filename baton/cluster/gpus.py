"""How many GPUs of this host workers may use, asked in a process that may hang and fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from baton.cluster.gpu_count import find_driver
from baton.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import get_log

# Of many GPUs that nobody keeps awake each takes the driver seconds.
_ANSWER_S = 60.0
_ASK = (sys.executable, "-m", "baton.cluster.gpu_count")

_log = get_log("gpus")


async def gpus_here(
    config: ClusterConfig, ask: Sequence[str] | None = None, within_s: float = _ANSWER_S
) -> int:
    """0 where they shall use none, where there is no driver, and where it fails: a worker that needs one will
    say so. BatonError(UNAVAILABLE) where it does not answer. `ask`: who is asked, in place of the driver."""
    if config.workers[0].engine.device == "cpu" or (ask is None and find_driver() is None):
        return 0
    process = await asyncio.create_subprocess_exec(
        *(ask or _ASK), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(within_s):
            said, _ = await process.communicate()
    except TimeoutError:
        message = f"the GPU driver has not said for {within_s:g} s how many GPUs there are"
        raise BatonError(ErrorKind.UNAVAILABLE, message) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        _log.warning("gpus_not_counted", why=said.decode(errors="replace").strip())
        return 0
    return int(said)
