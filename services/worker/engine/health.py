"""How an engine shows that it makes progress: its heartbeat, and the watch over its device.

The loop writes the heartbeat to shared memory with the expected duration of the current step; the front
kills an engine whose heartbeat stands still (`services/worker/front/engine_watch.py`). The loop itself
watches its device, and the engine ends where that hangs: the router continues its requests on other workers.
"""

from __future__ import annotations

from baton.engine.decode.loop import DecodeLoop
from baton.engine.prefill.loop import PrefillLoop
from baton.engine.rings.heartbeat import UNKNOWN_STEP_S, Heartbeat
from baton.errors import BatonError, ErrorKind
from services.common.observability.logs import get_log

log = get_log(__name__)


class EngineHeartbeat:
    """Writes the heartbeat of one engine's loop."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def turn(self) -> None:
        """Records a turn of the loop."""
        self._heartbeat.beat(0.0)

    def step(self, expected_s: float) -> None:
        """Records progress before or within a step that blocks the loop for about `expected_s` seconds; 0
        where no step was measured yet."""
        self._heartbeat.beat(expected_s or UNKNOWN_STEP_S)


def check_devices(decode: DecodeLoop, prefill: PrefillLoop) -> None:
    """Raises BatonError(UNAVAILABLE) where a device makes no progress. To be called once a turn."""
    loops: tuple[tuple[str, DecodeLoop | PrefillLoop], ...] = (("decode", decode), ("prefill", prefill))
    for name, loop in loops:
        if loop.device_hung():
            log.error("device_hung", steps=name, expected_step_s=loop.expected_step_s)
            raise BatonError(ErrorKind.UNAVAILABLE, f"the device makes no progress with its {name} steps")
