"""Builds an engine: constructs its components in order and passes each what it needs.

    model ─▶ KV wire format, links ─▶ decode loop, prefill steps ─▶ decode side ─▶ prefill side ─▶ planner,
    executor, reports, commands, loop

The decode side comes first, since the prefill side of a worker of role both hands over to it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from functools import partial

from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import SlotPool
from baton.engine.executor.decode_factory import decode_loop
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.executor import StepExecutor
from baton.engine.executor.prefill_steps import PrefillSteps
from baton.engine.expert_load import ExpertLoad
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.model.layers.experts import ExpertsMlp
from baton.engine.parallel.rank_exchange import DeviceGroup
from baton.engine.plan.pacing import PrefillPacing
from baton.engine.plan.step_planner import StepPlanner
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import MaskBoard
from baton.engine.shared_memory.step_shape import StepShape
from baton.v1.engine_pb2 import EngineEvent
from kvtransfer.device.blocks import DeviceSink
from kvtransfer.link.settings import LinkSettings, WindowSettings
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from kvtransfer.transports.listen_config import ListenConfig
from kvtransfer.transports.registry import make_connectors
from services.common.config.transfer import TransferConfig
from services.common.config.worker import WorkerConfig
from services.common.engine.channel import EngineEnd
from services.common.engine.launch import EngineLaunch, identity_of
from services.common.engine.rings import worker_rings
from services.worker.engine.commands import Commands
from services.worker.engine.decode.reserved_slots import ReservedBlockSink, ReservedSlots
from services.worker.engine.decode.side import DecodeSide
from services.worker.engine.decode.ticket_table import TicketTable
from services.worker.engine.loop import EngineLoop, beat_step
from services.worker.engine.prefill.jobs import PrefillJobs
from services.worker.engine.prefill.request_check import RequestCheck
from services.worker.engine.prefill.step_pipeline import PrefillPipeline
from services.worker.engine.reports import EngineReports
from services.worker.engine.startup.device_memory import device_memory
from services.worker.engine.startup.host_memory import check_installed
from services.worker.engine.startup.kv_wire_format import WireBlocks, wire_blocks
from services.worker.engine.startup.link_setup import device_blocks, nccl_links
from services.worker.engine.startup.link_tls import link_tls
from services.worker.engine.startup.lookahead_setup import lookahead_table
from services.worker.engine.startup.model_loader import LoadedModel
from services.worker.engine.startup.prefill_setup import prefill_steps
from services.worker.engine.startup.prefix_cache_setup import prefix_cache
from services.worker.engine.startup.startup_log import capture_logged, log_memory

# Bounds of the link work in one iteration of the loop, so that no kind of work starves the others.
_PIECES_A_TURN = 16
_PIECE_BYTES_A_TURN = 8 << 20


def build_engine(
    launch: EngineLaunch, model: LoadedModel, channel: EngineEnd, memory: SharedMemory
) -> EngineLoop:
    """Builds the engine of one worker and reports it ready to its front. On a GPU this compiles and captures:
    seconds. Raises BatonError(INVALID) where the configuration does not fit the model or the device."""
    config, wakeup = launch.worker, Wakeup()
    links = _Links(launch, model, wakeup.set)
    rings = worker_rings(config.engine)
    heartbeat = rings.heartbeat(memory)
    cache = prefix_cache(model, config, wakeup.set)
    steps, prompts = _step_loops(config, model, rings, memory, cache, partial(beat_step, heartbeat))
    sink = ReservedBlockSink(TicketTable(), links.wire)
    receiver, endpoints = links.open_receiver(config, sink, steps)
    decode = DecodeSide(
        model,
        steps,
        SlotPool(model.slots),
        sink,
        identity=links.identity,
        signer=links.signer,
        emit=channel.send,
        host=_host_blocks(config, model),
        reserve_output_tokens=config.engine.reserve_output_tokens,
        prefix_cache=cache,
        receiver=receiver,
        endpoints=endpoints,
        certificates=None if links.tls is None else links.tls.certificates,
        masks=_mask_board(launch, model),
    )
    sender = links.sender(model, config.transfer)
    check = RequestCheck(model, cache, shared_prefix_secret=bool(config.prefix_secret))
    local = decode.handoffs if config.role == "both" else None
    jobs = PrefillJobs(
        model, prompts.scheduler, sender, check, links.identity.incarnation, local, channel.send
    )
    pieces = links.pieces_a_turn
    configured_ms, reserved = config.engine.tpot_slo_ms, decode.reserved
    pacing = PrefillPacing(
        partial(_tpot_limit_s, configured_ms, reserved),
        all_limited=lambda: configured_ms is not None or reserved.all_limited,
        tokens_a_step=lambda: steps.tokens_a_step,
    )
    if steps.steps.policy is not None and configured_ms is not None:
        steps.steps.policy.limit_s = configured_ms / 1e3
    steps.steps.arriving = reserved.arriving
    planner = StepPlanner(prompts.scheduler, prompts.state, steps.steps, pacing, decode.step_s)
    prefill = PrefillPipeline(jobs, prompts, sender, pieces if links.device is not None else 0)
    executor = StepExecutor(planner, prompts, steps, links.launching)
    expert_load = _expert_load(model)
    reports = EngineReports(model, decode, prefill, executor, device_memory(model), expert_load)
    commands = Commands(channel, config.role, decode, prefill, reports)
    log_memory(model, config.engine)
    channel.send(EngineEvent(ready=reports.ready(config)))
    stepped = None if launch.stepped_fd is None else Wakeup(launch.stepped_fd)
    return EngineLoop(
        channel, wakeup, heartbeat, commands, decode, prefill, executor, links.nccl, pieces, stepped,
        expert_load,
    )  # fmt: skip


def _expert_load(model: LoadedModel) -> ExpertLoad | None:
    counters = [each.mlp.taken for each in model.ranks[0].layers if isinstance(each.mlp, ExpertsMlp)]
    return ExpertLoad(counters) if counters else None


def _tpot_limit_s(configured_ms: float | None, reserved: ReservedSlots) -> float:
    """Limit of a decode step's duration: the least of what is configured and what requests ask for."""
    configured = math.inf if configured_ms is None else configured_ms / 1e3
    return min(configured, reserved.tightest_tpot_s)


class _Links:
    """Parts that the links of a worker share, as senders and as receivers."""

    def __init__(self, launch: EngineLaunch, model: LoadedModel, wake: Callable[[], None]) -> None:
        transfer = launch.worker.transfer
        self.identity = identity_of(launch.worker, bytes.fromhex(launch.incarnation), launch.started_ns)
        self.auth = LinkAuth(launch.worker.cluster_secret)
        self.tls = link_tls(launch.worker)
        self.signer = TicketSigner(secrets.token_bytes(32))
        self.wire = wire_blocks(model.cache, model.fingerprint, transfer.kv_wire)
        self.settings = LinkSettings(
            self.identity, self.wire.fingerprint, self.wire.block_bytes, transfer.peer_timeout_s
        )
        self.device = device_blocks(model, transfer)  # None where the host moves blocks
        self.launching = None if self.device is None else self.device.device.launching
        self.nccl = nccl_links(self.device, transfer.transport)
        self.wake = wake
        self.pieces_a_turn = _PIECES_A_TURN
        if self.device is None:  # the host copies every byte of them
            largest = min(max(self.wire.block_bytes), transfer.piece_bytes)
            self.pieces_a_turn = min(_PIECES_A_TURN, max(1, _PIECE_BYTES_A_TURN // largest))

    def open_receiver(
        self, config: WorkerConfig, sink: ReservedBlockSink, loop: DecodeLoop
    ) -> tuple[Receiver | None, tuple[Endpoint, ...]]:
        """The receiver that writes into `sink`, listening, and its endpoints for tickets. None and empty
        where the worker takes no handoffs from others."""
        if not config.receives_handoffs:
            return None, ()
        transfer, device = config.transfer, None
        if self.device is not None:
            device = DeviceSink(self.device, sink.place, steps_run=lambda: loop.has_work)
        receiver = Receiver(
            settings=self.settings,
            window=WindowSettings(
                self.wire.piece_bytes(transfer.piece_bytes), transfer.window_pieces, transfer.max_links
            ),
            signer=self.signer,
            sink=sink,
            wake=self.wake,
            device=device,
        )
        endpoints = receiver.listen(
            ListenConfig(
                config.host,
                transfer.transfer_port,
                listen_host=config.bound_host,
                transport=transfer.transport,
                nccl=self.nccl,
                auth=self.auth,
                frames_port=transfer.frames_port,
                tls=self.tls,
            )
        )
        return receiver, endpoints

    def sender(self, model: LoadedModel, transfer: TransferConfig) -> Sender:
        return Sender(
            settings=self.settings,
            source=_PinnedBlocks(model, self.wire),
            wake=self.wake,
            connectors=make_connectors(
                transfer.transport, self.wake, self.device, self.nccl, self.auth, self.tls
            ),
        )


def _host_blocks(config: WorkerConfig, model: LoadedModel) -> HostBlocks:
    """Room for swapped-out sequences. Raises BatonError(INVALID) where the host has less memory."""
    size = config.engine.host_kv_mb * 10**6 if config.role != "prefill" else 0
    check_installed("host_kv_mb", size)
    return HostBlocks(model.cache, size)


def _mask_board(launch: EngineLaunch, model: LoadedModel) -> MaskBoard | None:
    """Maps the board on which mask processes leave grammar masks. Raises BatonError(INVALID) if the front has
    made it for another vocabulary."""
    if launch.masks_fd is None:
        return None
    slots = worker_rings(launch.worker.engine).slots
    return MaskBoard(SharedMemory.attach(launch.masks_fd), slots, model.config.vocab_size)


def _step_loops(
    config: WorkerConfig,
    model: LoadedModel,
    rings: SharedRings,
    memory: SharedMemory,
    cache: PrefixCache | None,
    before_step: Callable[[float], None],
) -> tuple[DecodeLoop, PrefillSteps]:
    """Executor of both kinds of steps; the one that a worker's role does not need compiles and captures
    nothing."""
    decodes, prefills = config.role != "prefill", config.role != "decode"
    widths = tuple(group.blocks_for(model.max_context_tokens) for group in model.layout.groups)
    drafts = decodes and model.rows_per_slot > 1
    # As wide as the vocabulary: kept small where no slot is ever used.
    state = SlotState(
        model.slots if decodes else 1,
        widths,
        model.config.vocab_size,
        model.device,
        model.rows_per_slot if decodes else 1,
        config.engine.history_tokens(model.max_context_tokens) if drafts else 0,
        lookahead_table(model, config.engine) if drafts else None,
    )
    mixes = decodes and prefills and config.engine.mixed_steps and not model.exact
    with capture_logged(model.device):
        group = device_group(config, model, state.shape, mixes=mixes)
        steps = decode_loop(
            model.ranks,
            model.cache,
            state,
            rings,
            memory,
            exact=model.exact,
            serves=decodes,
            mixes=mixes,
            before_step=before_step,
            adaptive=config.engine.speculation == "auto",
            group=group,
        )
        prompts = prefill_steps(
            model,
            config.engine,
            cache,
            serves=prefills,
            stream=steps.stream if decodes and prefills else None,
            before_step=before_step,
            joined=tuple(steps.mixed.values()),
            group=group,
        )
    return steps, prompts


def device_group(
    config: WorkerConfig, model: LoadedModel, shape: StepShape, *, mixes: bool
) -> DeviceGroup | None:
    """Makes what several GPUs exchange through in the steps of a worker's role; None for one device and for a
    CPU. In mode `exact` prompts are computed by the reference, which exchanges by itself. `mixes`: whether
    decode steps join prefill steps."""
    if len(model.ranks) == 1 or model.device.type != "cuda":
        return None
    from baton.engine.decode.gpu_group import gpu_group
    from baton.engine.kernels.product_rows import product_rows

    decode_rows = 0 if config.role == "prefill" else shape.rows
    prompt_rows = 0
    if config.role != "decode" and not model.exact:
        prompt_rows = product_rows(model.chunk_tokens + (decode_rows if mixes else 0))
    if not decode_rows and not prompt_rows:
        return None
    return gpu_group(model.ranks, decode_rows, prompt_rows, config.engine.exchange_deadline_s)


class _PinnedBlocks:
    """The sender's `BlockSource`: pinned blocks of the cache."""

    def __init__(self, model: LoadedModel, wire: WireBlocks) -> None:
        self._pools = model.pools.pools
        self.read = wire.read

    def unpin(self, group: int, block: int) -> None:
        self._pools[group].unpin(block)
