"""The loop of an engine process.

    commands ─▶ links (verify, scatter, gather; bounded) ─▶ a prefill step ─▶ a decode step ─▶ wait where idle

A decode step on a CPU is interrupted between its layers: for pieces that arrive, and for reservations, which
requests wait for before their prompts are begun.

The loop writes a heartbeat to shared memory with the expected duration of the current step; the front kills
an engine whose heartbeat stands still (`services/worker/front/engine_handle.py`). The loop itself watches its
device, and the engine ends where that hangs: the router continues its requests on other workers.
"""

from __future__ import annotations

import selectors
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.device.wakeup import Wakeup
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.executor import StepExecutor
from baton.engine.executor.prefill_steps import PrefillSteps
from baton.engine.expert_load import ExpertLoad
from baton.engine.parallel.exchange import ExchangeTimeoutError
from baton.engine.shared_memory.heartbeat import UNKNOWN_STEP_S, Heartbeat
from baton.v1.engine_pb2 import EngineEvent, PrefixesEvent, RestartNeededEvent
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from services.common.engine.channel import EngineEnd
from services.common.observability.logs import get_log
from services.worker.engine.commands import Commands
from services.worker.engine.decode.side import DecodeSide
from services.worker.engine.prefill.step_pipeline import PrefillPipeline

# The most blocks of an event that reports what entered and left the prefix cache.
_PREFIXES_AN_EVENT = 512
# The most pieces that are received between two layers of a decode step on a CPU.
_PIECES_BETWEEN_LAYERS = 1
# The longest that an idle loop waits.
_IDLE_S = 0.05
# The longest wait while a GPU computes a prefill step, and how near to its expected end the loop polls soon:
# the rest of a handoff begins there, with nothing to overlap it.
_STEP_RUNS_S = 0.0002
_NEAR_END_S = 0.002
# While a device moves blocks.
_BUSY_POLL_S = 0.0
# While a device may begin to. A zero timeout would starve the threads that carry its bytes, which need the
# GIL; a blocking wait takes about 50 µs more.
_POLL_SOON_S = 0.00002
# While grammar masks are expected.
_MASKS_S = 0.0002

log = get_log(__name__)


@dataclass(eq=False)
class EngineLoop:
    """Runs the components of one engine; `assembly` builds them. `stepped`: set when decode steps have ended;
    the front waits for it to read their tokens."""

    channel: EngineEnd
    wakeup: Wakeup
    heartbeat: Heartbeat
    commands: Commands
    decode: DecodeSide
    prefill: PrefillPipeline
    steps: StepExecutor
    nccl: NcclEndpoint | None
    pieces_a_turn: int
    stepped: Wakeup | None = None
    expert_load: ExpertLoad | None = None
    _steps_announced: int = field(default=0, init=False)
    _restart_reported: bool = field(default=False, init=False)

    def run(self) -> None:
        """Runs until a stop command. Raises ChannelClosedError if the front is gone, BatonError if the device
        hangs."""
        selector = selectors.SelectSelector()  # epoll waits for whole milliseconds
        selector.register(self.channel, selectors.EVENT_READ)
        selector.register(self.wakeup, selectors.EVENT_READ)
        while not self.commands.stopping:
            if not self.turn():
                selector.select(self._wait_s())
        self.close()

    def turn(self) -> bool:
        """Runs one iteration of the loop; returns False if there was nothing to do. Raises
        BatonError(UNAVAILABLE) if the device hangs."""
        self.heartbeat.beat(0.0)
        self._announce_steps()  # steps of a GPU, which have ended since the last iteration
        self._check_device("decode", self.decode.loop)
        self._check_device("prefill", self.prefill.steps)
        self.wakeup.clear()
        worked = self.commands.handle()
        self.decode.reserved.expire()
        if self.expert_load is not None:
            self.expert_load.observe()
        if self.decode.prefix_cache is not None:
            worked |= self.decode.prefix_cache.poll()
        worked |= self.decode.handoffs.poll(self.pieces_a_turn)
        worked |= self.prefill.poll(self.pieces_a_turn)
        planner, prompts = self.steps.planner, self.prefill.steps
        decoding = self.decode.allocation.running > 0
        planner.look(planner.clock(), self.decode.loop.ring.steps, decoding=decoding)
        steps_ended = prompts.steps_ended
        worked |= self.prefill.step(self.steps.step_prompts)
        worked |= prompts.steps_ended > steps_ended
        self.decode.allocation.step()
        worked |= self.decode.take_masks()
        worked |= self.steps.step_decode(self._between_layers) is not None
        self._announce_steps()
        self._report_prefixes()
        self._report_restart_needed()
        return worked

    def close(self) -> None:
        """Closes links and the prefix cache's stores."""
        self.prefill.sender.close()
        if self.decode.prefix_cache is not None:
            self.decode.prefix_cache.close()
        if self.decode.receiver is not None:
            self.decode.receiver.close()

    def _wait_s(self) -> float:
        """Seconds that the loop may wait after an iteration with nothing to do."""
        receiver, prompts = self.decode.receiver, self.prefill.steps
        if self.prefill.sender.busy_poll or (receiver is not None and receiver.busy_poll):
            return _BUSY_POLL_S
        if receiver is not None and receiver.poll_soon:
            return _POLL_SOON_S
        if prompts.under_way:
            return _POLL_SOON_S if abs(prompts.ends_in_s) < _NEAR_END_S else _STEP_RUNS_S
        if not self.decode.loop.has_work:
            return _IDLE_S
        nap_s = self.decode.loop.nap_s
        return min(nap_s, _MASKS_S) if self.decode.masks_expected else nap_s

    def _announce_steps(self) -> None:
        """Wakes the front where decode steps have ended since the last call."""
        steps = self.decode.loop.ring.steps
        if steps != self._steps_announced and self.stepped is not None:
            self._steps_announced = steps
            self.stepped.set()

    def _between_layers(self) -> None:
        """Does what cannot wait for the end of a decode step that the host computes."""
        beat_step(self.heartbeat, self.decode.loop.expected_step_s)
        self.decode.handoffs.receive_pieces(_PIECES_BETWEEN_LAYERS)
        self.commands.handle_urgent()

    def _check_device(self, steps: str, loop: DecodeLoop | PrefillSteps) -> None:
        """Raises BatonError(UNAVAILABLE) where the device makes no progress, or one of several has waited for
        another in vain. To be called once per iteration."""
        try:
            hung = loop.device_hung()
        except ExchangeTimeoutError as timeout:  # logged as `exchange_timeout`
            raise exchange_failed(timeout) from timeout
        if hung:
            last = str(self.steps.last_plan)
            log.error("device_hung", steps=steps, expected_step_s=loop.expected_step_s, last_plan=last)
            raise BatonError(ErrorKind.UNAVAILABLE, f"the device makes no progress with its {steps} steps")

    def _report_prefixes(self) -> None:
        """Reports the blocks that entered and left the prefix cache, for the routers' index."""
        if self.decode.prefix_cache is not None:
            added, removed = self.decode.prefix_cache.take_changes(_PREFIXES_AN_EVENT)
            if added or removed:
                self.channel.send(EngineEvent(prefixes=PrefixesEvent(added=added, removed=removed)))

    def _report_restart_needed(self) -> None:
        """Reports once that NCCL hangs: the device memory of its links cannot be freed in this process."""
        if self.nccl is not None and not self._restart_reported and self.nccl.hung:
            self._restart_reported = True
            needed = RestartNeededEvent(reason="NCCL did not end a link in time")
            self.channel.send(EngineEvent(restart_needed=needed))


def exchange_failed(timeout: ExchangeTimeoutError) -> BatonError:
    """The error with which an engine ends whose devices waited for one another in vain."""
    return BatonError(ErrorKind.UNAVAILABLE, str(timeout), cause=FailureCause.EXCHANGE)


def beat_step(heartbeat: Heartbeat, expected_s: float) -> None:
    """Records progress before or within a step that blocks the loop for about `expected_s` seconds; 0 where
    no step was measured yet."""
    heartbeat.beat(expected_s or UNKNOWN_STEP_S)
