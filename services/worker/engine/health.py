"""How an engine shows that it makes progress: its heartbeat, and what it sees of its device.

The loop writes the heartbeat to shared memory, with how long the current step should take; the front kills an
engine whose heartbeat stands still (`engine_watch`). The loop itself watches its device, and ends where that
hangs: every stream of the worker then goes on elsewhere.
"""

from __future__ import annotations

from baton.engine.decode.loop import DecodeLoop
from baton.engine.prefill.loop import PrefillLoop
from baton.engine.rings.heartbeat import UNKNOWN_STEP_S, Heartbeat
from baton.errors import BatonError, ErrorKind
from services.common.logs import get_log

log = get_log(__name__)


class EngineHealth:
    """Of one engine's loop, which calls `turned` once a turn."""

    def __init__(self, heartbeat: Heartbeat, decode: DecodeLoop, prefill: PrefillLoop) -> None:
        self._heartbeat = heartbeat
        self._decode = decode
        self._loops = (("decode", decode), ("prefill", prefill))
        for _, loop in self._loops:
            loop.before_step = self._step_begins
        self._heartbeat.beat(0.0)

    def turned(self) -> None:
        """Records a turn of the loop. Raises BatonError(UNAVAILABLE) where the device hangs."""
        self._heartbeat.beat(0.0)
        for name, loop in self._loops:
            if loop.device_hung():
                log.error("device_hung", steps=name, expected_step_s=loop.expected_step_s)
                raise BatonError(ErrorKind.UNAVAILABLE, f"the device makes no progress with its {name} steps")

    def between_layers(self) -> None:
        """Records progress within a decode step that the host computes."""
        self._step_begins(self._decode.expected_step_s)

    def _step_begins(self, expected_s: float) -> None:
        """A step that the host computes blocks the loop for about `expected_s` seconds; 0: not known yet."""
        self._heartbeat.beat(expected_s or UNKNOWN_STEP_S)
