"""The engine process of a worker: one loop that computes, and nothing else competes with it.

    commands ─▶ links (verify, scatter, gather; bounded) ─▶ a prefill step ─▶ a decode step ─▶ wait if idle

A decode step is interrupted between its layers for reservations alone: a promise is what a request
waits for before its prompt is even begun. The front knows by a heartbeat that the loop makes progress.

Started by the worker's front (`services/worker/front/engine_handle.py`), which hands it one end of a
socket pair and the shared memory of mailbox and output ring. Both processes share one incarnation
and die together.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import selectors
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

import torch

from baton.device.heap import keep_freed_memory
from baton.device.kernel_cache import keep_kernels_in
from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.decode.factory import decode_loop
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import SlotPool
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.rings.layout import SharedRings
from baton.errors import BatonError, ErrorKind
from baton.timer_slack import sharpen_timers
from baton.v1.engine_pb2 import (
    DoneEvent,
    EngineCommand,
    EngineEvent,
    FailedEvent,
    HandoffStateEvent,
    PrefixesEvent,
    ReadyEvent,
    UnfitEvent,
)
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from kvtransfer.transports.registry import make_connectors
from services.common.config import EngineConfig
from services.common.engine_channel import ChannelClosedError, EngineEnd
from services.common.engine_launch import EngineLaunch, identity_of
from services.common.logs import configure_logs, get_log
from services.worker.engine import audit
from services.worker.engine.decode.reservations import DecodeSide
from services.worker.engine.decode.ticket_book import AttemptKey
from services.worker.engine.health import EngineHealth
from services.worker.engine.parts import Parts
from services.worker.engine.prefill.requests import PrefillSide
from services.worker.engine.startup.kv_wire_format import WireBlocks, wire_blocks
from services.worker.engine.startup.link_setup import check_transport, device_blocks, nccl_links
from services.worker.engine.startup.model_loader import LoadedModel, load
from services.worker.engine.startup.prefill_setup import prefill_loop
from services.worker.engine.startup.prefix_cache_setup import prefix_cache
from services.worker.engine.startup.startup_log import capture_told, tell_memory
from services.worker.engine.step_clock import StepClock
from services.worker.pool import pool_of

# Bounds of one turn of the loop: no kind of work starves the others.
_COMMANDS_A_TURN = 64
_PIECES_A_TURN = 16
_PIECE_BYTES_A_TURN = 8 << 20
_PREFIXES_AN_EVENT = 512
# What a decode step is interrupted for: none of it touches anything that the step reads.
_MEANWHILE = frozenset({"reserve", "slot_ended"})
_PIECES_MEANWHILE = 1
_IDLE_S = 0.05
# While a GPU computes a prefill step: how late its end is seen at most. Near to where it is expected it is
# looked for more often: what of a handoff comes behind it nothing hides.
_UNDER_WAY_S = 0.0002
_NEAR_END_S = 0.002
# While a GPU moves blocks: not at all.
_RESTLESS_S = 0.0
# While one may, and threads that need Python's lock carry its bytes; a wait takes the kernel 50 µs more.
_EXPECTANT_S = 0.00002

log = get_log(__name__)


class Engine:
    """Builds the parts and turns the loop until told to stop or left alone."""

    def __init__(
        self, launch: EngineLaunch, model: LoadedModel, channel: EngineEnd, memory: SharedMemory
    ) -> None:
        self._config = launch.worker
        self._channel = channel
        self._wakeup = Wakeup()
        self._stopping = False
        self._identity = identity_of(launch.worker, bytes.fromhex(launch.incarnation), launch.started_ns)
        self._auth = LinkAuth(launch.worker.cluster_secret)
        self._signer = TicketSigner(secrets.token_bytes(32))
        transport = launch.worker.transfer.transport
        self._wire = wire_blocks(model.cache, model.fingerprint, launch.worker.transfer.kv_wire)
        self._blocks = device_blocks(model, launch.worker.transfer)
        self._nccl = nccl_links(self._blocks, transport)
        self._unfit = False
        largest = max(self._wire.block_bytes)
        by_bytes = _PIECE_BYTES_A_TURN // min(largest, launch.worker.transfer.piece_bytes)
        if self._blocks is not None:  # whose bytes a device moves
            by_bytes = _PIECES_A_TURN
        self._pieces = min(_PIECES_A_TURN, max(1, by_bytes))
        # Received and not handled yet, in order.
        self._commands: deque[EngineCommand] = deque()
        self._rings = SharedRings(self._config.engine.most_slots, self._config.engine.max_logprobs)
        self._parts = self._build(model, memory)
        loops = self._parts.decode_loop, self._parts.prefill.loop
        self._health = EngineHealth(self._rings.heartbeat(memory), *loops)
        self._parts.decode_loop.meanwhile = self._meanwhile
        endpoints = self._listen()
        tell_memory(model, self._config.engine)
        self._emit(EngineEvent(ready=self._ready(endpoints)))

    def run(self) -> None:
        """Turns until StopCommand. Raises ChannelClosedError when the front is gone."""
        selector = selectors.SelectSelector()  # epoll's waits are whole milliseconds
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while not self._stopping:
            if not self._turn():
                selector.select(self._patience())
        self.close()

    def _patience(self) -> float:
        """How long a turn with nothing to do may wait for the next."""
        receiver = self._parts.receiver
        if self._parts.sender.busy_poll or (receiver is not None and receiver.busy_poll):
            return _RESTLESS_S
        if receiver is not None and receiver.poll_soon:
            return _EXPECTANT_S
        prompts = self._parts.prefill.loop
        if prompts.under_way:
            return _EXPECTANT_S if abs(prompts.ends_in_s) < _NEAR_END_S else _UNDER_WAY_S
        loop = self._parts.decode_loop
        return loop.nap_s if loop.has_work else _IDLE_S

    def close(self) -> None:
        self._parts.sender.close()
        if self._parts.prefixes is not None:
            self._parts.prefixes.close()
        if self._parts.receiver is not None:
            self._parts.receiver.close()

    def _turn(self) -> bool:
        """One turn; False where nothing was left to do. Raises BatonError where the device hangs."""
        self._health.turned()
        self._wakeup.clear()
        parts = self._parts
        commands = self._receive()
        for _ in range(commands):
            self._handle(self._commands.popleft())
        parts.decode.expire()
        stored = parts.prefixes is not None and parts.prefixes.poll()
        linked = parts.decode.poll(self._pieces) | parts.prefill.poll(self._pieces)
        steps = parts.prefill.loop.steps_ended
        prefilled = parts.prefill_clock.timed(parts.prefill.step)
        prefilled |= parts.prefill.loop.steps_ended > steps
        parts.decode.growth.step()
        decoded = parts.decode_clock.timed(parts.decode_loop.step)
        self._tell_prefixes()
        self._tell_unfit()
        return bool(commands) or stored or linked or prefilled or decoded

    def _tell_prefixes(self) -> None:
        """What came into the prefix cache and what left it, for those who choose where a prompt goes."""
        if self._parts.prefixes is not None:
            added, removed = self._parts.prefixes.take_changes(_PREFIXES_AN_EVENT)
            if added or removed:
                self._emit(EngineEvent(prefixes=PrefixesEvent(added=added, removed=removed)))

    def _tell_unfit(self) -> None:
        """Once: where NCCL hangs there is memory that nobody will get back from this process."""
        if self._nccl is not None and not self._unfit and self._nccl.hung:
            self._unfit = True
            reason = "NCCL did not end a link in time"
            self._emit(EngineEvent(unfit=UnfitEvent(reason=reason)))

    def _receive(self) -> int:
        """Takes in what has come; how many commands wait now, at most a turn's."""
        self._commands += self._channel.receive(_COMMANDS_A_TURN - len(self._commands))
        return len(self._commands)

    def _meanwhile(self) -> None:
        """Between two layers of a decode step. Commands keep their order: what may not be handled now holds
        up what came behind it."""
        self._health.between_layers()
        self._parts.decode.land(_PIECES_MEANWHILE)
        self._receive()
        while self._commands and self._commands[0].WhichOneof("command") in _MEANWHILE:
            self._handle(self._commands.popleft())

    def _handle(self, command: EngineCommand) -> None:
        try:
            event = self._answer(command)
        except BatonError as error:
            # A full worker refuses in its ordinary course, and the router asks again.
            level = "debug" if error.kind is ErrorKind.OVERLOADED else "warning"
            getattr(log, level)(
                "command refused", command=command.WhichOneof("command"), reason=error.message
            )
            event = EngineEvent(failed=_failed(error))
        if event is not None and command.id:  # nobody waits for the answer to command 0
            event.id = command.id
            self._emit(event)

    def _answer(self, command: EngineCommand) -> EngineEvent | None:
        parts = self._parts
        match command.WhichOneof("command"):
            case "reserve":
                self._require("decode")
                return EngineEvent(reserved=parts.decode.reserve(command.reserve.request))
            case "prefill":
                self._require("prefill")
                parts.prefill.start(command.id, command.prefill.request)
                return None
            case "give_ticket":
                parts.prefill.give_ticket(command.give_ticket.request)
                return EngineEvent(done=DoneEvent())
            case "cancel":
                key = AttemptKey.of(command.cancel.attempt)
                parts.prefill.cancel(key)
                if not command.cancel.prefill_only:
                    parts.decode.cancel(key)
                return EngineEvent(done=DoneEvent())
            case "slot_ended":
                ended = command.slot_ended
                parts.decode.slot_ended(ended.slot, ended.generation, ended.token_ids)
                return None
            case "audit":
                return EngineEvent(audit=audit.make(parts, integrity=not command.audit.skip_integrity))
            case "handoff_state":
                state = parts.decode.state_of(AttemptKey.of(command.handoff_state.attempt))
                return EngineEvent(handoff_state=HandoffStateEvent(state=state))
            case "describe":
                return EngineEvent(load=audit.load(parts))
            case "stop":
                self._stopping = True
                return EngineEvent(done=DoneEvent())
        raise BatonError(ErrorKind.INTERNAL, "the engine was sent an unknown command")

    def _require(self, role: str) -> None:
        if self._config.role not in (role, "both"):
            raise BatonError(ErrorKind.CONFLICT, f"this worker's role is {self._config.role}, not {role}")

    def _build(self, model: LoadedModel, memory: SharedMemory) -> Parts:
        engine = self._config.engine
        slots = SlotPool(model.slots)
        widths = tuple(group.blocks_for(model.max_context_tokens) for group in model.layout.groups)
        serves = self._config.role != "prefill"
        # As wide as the vocabulary: one that admits nobody has no slots to speak of.
        state = SlotState(model.slots if serves else 1, widths, model.config.vocab_size, model.device)
        prefixes = prefix_cache(model, self._config, self._wakeup.set)
        with capture_told(model.device):
            loop = decode_loop(
                model.decoder, model.cache, state, self._rings, memory, exact=model.exact, serves=serves
            )
            prompts = prefill_loop(model, engine, prefixes, serves=self._config.role != "decode")
        decode = DecodeSide(
            model,
            loop,
            slots,
            self._identity,
            self._signer,
            self._emit,
            host=HostBlocks(model.cache, engine.host_kv_mb * 10**6 if serves else 0),
            reserve_output_tokens=engine.reserve_output_tokens,
            prefixes=prefixes,
            wire=self._wire,
        )
        local = decode if self._config.role == "both" else None
        sender = Sender(
            identity=self._identity,
            fingerprint=self._wire.fingerprint,
            block_bytes=self._wire.block_bytes,
            source=_Source(model, self._wire),
            peer_timeout_s=self._config.transfer.peer_timeout_s,
            wake=self._wakeup.set,
            connectors=make_connectors(
                self._config.transfer.transport, self._wakeup.set, self._blocks, self._nccl, self._auth
            ),
        )
        prefill = PrefillSide(
            model, prompts, self._identity, sender, local, self._emit, prefixes,
            names_agree=bool(self._config.prefix_secret),
            ships_first=self._pieces if self._blocks is not None else 0,
        )  # fmt: skip
        decode.before_free = prefill.cancel
        clocks = (
            StepClock(lambda: prompts.tokens_run, ended=lambda: prompts.steps_ended),
            StepClock(lambda: loop.tokens_decoded, ended=lambda: loop.ring.steps + loop.ring.full_steps),
        )
        return Parts(model, slots, prefill, decode, loop, sender, None, *clocks, prefixes)

    def _listen(self) -> tuple[Endpoint, ...]:
        """A decode worker opens its receiver; the other roles move no bytes in."""
        if self._config.role != "decode":
            return ()
        transfer, device = self._config.transfer, None
        if self._blocks is not None:
            loop = self._parts.decode_loop
            device = DeviceSink(self._blocks, self._parts.decode.place, steps_run=lambda: loop.has_work)
        receiver = Receiver(
            identity=self._identity,
            fingerprint=self._wire.fingerprint,
            signer=self._signer,
            block_bytes=self._wire.block_bytes,
            piece_bytes=self._wire.piece_bytes(transfer.piece_bytes),
            window_pieces=transfer.window_pieces,
            sink=self._parts.decode,
            wake=self._wakeup.set,
            peer_timeout_s=transfer.peer_timeout_s,
            device=device,
        )
        endpoints = receiver.listen(
            self._config.host,
            transfer.transfer_port,
            transport=transfer.transport,
            nccl=self._nccl,
            auth=self._auth,
            frames_port=transfer.frames_port,
        )
        self._parts.receiver = receiver
        self._parts.decode.receive_with(receiver, endpoints)
        return endpoints

    def _ready(self, endpoints: tuple[Endpoint, ...]) -> ReadyEvent:
        model = self._parts.model
        return ReadyEvent(
            fingerprint=model.fingerprint,
            max_context_tokens=model.max_context_tokens,
            vocab_size=model.config.vocab_size,
            load=audit.load(self._parts),
            device=str(model.device),
            transfer_endpoints=[endpoint.message() for endpoint in endpoints],
            cache_dtype=model.layout.cache_dtype if self._parts.prefixes is not None else "",
            pool=pool_of(self._config, model),
            weight_format=model.weight_format,
        )

    def _emit(self, event: EngineEvent) -> None:
        self._channel.send(event)


class _Source:
    """kvtransfer's view of the cache: bytes of pinned blocks."""

    def __init__(self, model: LoadedModel, wire: WireBlocks) -> None:
        self._model = model
        self.read = wire.read

    def unpin(self, group: int, block: int) -> None:
        self._model.pools.pools[group].unpin(block)


def _failed(error: BatonError) -> FailedEvent:
    return FailedEvent(kind=error.kind.value, message=error.message)  # type: ignore[arg-type]


def main(load_model: Callable[[str, EngineConfig], LoadedModel] = load) -> int:
    """Runs an engine until its front stops it; the exit code is for the front's log only."""
    launch = EngineLaunch.model_validate_json(sys.stdin.read())
    keep_freed_memory()
    sharpen_timers()
    # A signal to the whole process group is the front's to answer: it drains, then tells us to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logs(launch.worker.log_level, process="engine", worker=launch.worker.name)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    channel = EngineEnd(socket.socket(fileno=launch.channel_fd))
    try:
        if launch.worker.engine.kernel_cache is not None:
            keep_kernels_in(launch.worker.engine.kernel_cache)
        check_transport(launch.worker)
        model = load_model(launch.worker.model, launch.worker.engine)
        engine = Engine(launch, model, channel, SharedMemory.attach(launch.memory_fd))
        gc.freeze()  # a look at all that was loaded would hold up every slot for 100 ms and more
        gc.enable()
        engine.run()
    except ChannelClosedError:
        return 1  # the front has ended, and we with it
    except BatonError as error:
        _say_why(channel, error)
        return 2
    except Exception as error:
        log.exception("engine failed")
        _say_why(channel, _reason(error))
        return 1
    return 0


def _reason(error: Exception) -> BatonError:
    if isinstance(error, torch.OutOfMemoryError):
        first = (str(error).splitlines() or [""])[0]
        return BatonError(ErrorKind.UNAVAILABLE, f"the GPU's memory is used up: {first}")
    return BatonError(ErrorKind.INTERNAL, f"the engine failed: {type(error).__name__}")


def _say_why(channel: EngineEnd, error: BatonError) -> None:
    """The engine's last word; a front that is being stopped may have ended before it."""
    with contextlib.suppress(ChannelClosedError):
        channel.send(EngineEvent(failed=_failed(error)))
