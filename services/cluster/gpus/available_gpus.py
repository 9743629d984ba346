"""Counts the GPUs of this host in a child process, since the driver may hang or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.base.python_module import python_module
from services.cluster.gpus.gpu_count import find_driver
from services.common.config.cluster import ClusterConfig
from services.common.observability.logs import get_log

# Each GPU without persistence mode takes the driver seconds to initialise.
_ANSWER_S = 60.0
_ASK = python_module("services.cluster.gpus.gpu_count")

_log = get_log("gpus")


async def available_gpus(
    config: ClusterConfig, ask: Sequence[str] | None = None, within_s: float = _ANSWER_S
) -> int:
    """The number of GPUs that workers of this host may use.

    0 where the configuration uses none, where there is no driver, and where the driver fails: a worker that
    needs a GPU reports that itself. `ask` replaces the command that counts. Raises BatonError(UNAVAILABLE)
    where it does not answer within `within_s` seconds.
    """
    if config.workers[0].engine.device == "cpu" or (ask is None and find_driver() is None):
        return 0
    process = await asyncio.create_subprocess_exec(
        *(ask or _ASK), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate()
    except TimeoutError:
        message = f"the GPU driver did not report the number of GPUs within {within_s:g} s"
        raise BatonError(ErrorKind.UNAVAILABLE, message) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        _log.warning("gpu_count_failed", reason=output.decode(errors="replace").strip())
        return 0
    return int(output)
