"""The engine process of a worker, which computes and does nothing that competes with it.

Started by the worker's front (`services/worker/front/engine_handle.py`), which passes one end of a socket
pair and the shared memory of mailbox and output ring. Both processes share one incarnation and end together.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable

import torch

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_tuning import keep_freed_memory, sharpen_timers
from baton.device.shared_memory import SharedMemory
from baton.engine.parallel.exchange import ExchangeTimeoutError
from services.common.config.worker import EngineConfig, WorkerConfig
from services.common.engine.channel import ChannelClosedError, EngineEnd, failed_event
from services.common.engine.launch import EngineLaunch
from services.common.observability.logs import configure_logs, get_log
from services.worker.engine.assembly import build_engine
from services.worker.engine.loop import exchange_failed
from services.worker.engine.startup.link_setup import check_transport
from services.worker.engine.startup.model_loader import LoadedModel, load
from services.worker.engine.startup.shipped_kernels import use_kernel_cache

log = get_log(__name__)


def main(load_model: Callable[[str, EngineConfig], LoadedModel] = load) -> int:
    """Runs an engine until its front stops it; the exit code is for the front's log only."""
    launch = EngineLaunch.model_validate_json(sys.stdin.read())
    launch = launch.model_copy(update={"worker": _for_its_role(launch.worker)})
    keep_freed_memory()
    sharpen_timers()
    # A signal to the process group is the front's to handle: it drains, then sends a stop command.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logs(launch.worker.log_level, exception_texts=True, process="engine", worker=launch.worker.name)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    channel = EngineEnd(socket.socket(fileno=launch.channel_fd))
    try:
        use_kernel_cache(launch.worker.engine)
        check_transport(launch.worker)
        model = load_model(launch.worker.model, launch.worker.engine)
        engine = build_engine(launch, model, channel, SharedMemory.attach(launch.memory_fd))
        gc.freeze()  # a collection over all loaded objects would block every slot for 100 ms and more
        gc.enable()
        engine.run()
    except ChannelClosedError:
        return 1  # the front has ended
    except BatonError as error:
        _report_failure(channel, error)
        return 2
    except ExchangeTimeoutError as timeout:  # before the loop runs; logged as `exchange_timeout`
        _report_failure(channel, exchange_failed(timeout))
        return 2
    except Exception as error:
        log.exception("engine_failed")
        _report_failure(channel, _as_baton_error(error))
        return 1
    return 0


def _for_its_role(worker: WorkerConfig) -> WorkerConfig:
    """Without what a worker of its role has no use for: kernels for decode steps that are tuned, and memory
    for decode steps that are part of prefill steps."""
    unused: dict[str, object] = {}
    if worker.role == "prefill":
        unused["tune"] = "off"
    if worker.role != "both":
        unused["mixed_steps"] = False
    return worker.model_copy(update={"engine": worker.engine.model_copy(update=unused)})


def _as_baton_error(error: Exception) -> BatonError:
    if isinstance(error, torch.OutOfMemoryError):
        first = (str(error).splitlines() or [""])[0]
        return BatonError(ErrorKind.UNAVAILABLE, f"the GPU is out of memory: {first}")
    return BatonError(ErrorKind.INTERNAL, f"the engine failed: {type(error).__name__}")


def _report_failure(channel: EngineEnd, error: BatonError) -> None:
    """Sends the engine's last event; a front that is being stopped may have ended before."""
    with contextlib.suppress(ChannelClosedError):
        channel.send(failed_event(error))
