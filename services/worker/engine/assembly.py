"""Builds an engine: constructs its components in order and passes each what it needs.

    model ─▶ KV wire format, links ─▶ decode loop, prefill loop ─▶ decode side ─▶ prefill side ─▶ audit,
    commands, loop

The decode side comes first, since the prefill side of a worker of role both hands over to it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.device.shared_memory import SharedMemory
from baton.device.wakeup import Wakeup
from baton.engine.decode.factory import decode_loop
from baton.engine.decode.loop import DecodeLoop
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import SlotPool
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.prefill.loop import PrefillLoop
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.rings.layout import SharedRings
from baton.v1.engine_pb2 import EngineEvent, ReadyEvent
from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.device.blocks import DeviceBlocks, DeviceSink
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from kvtransfer.transports.nccl.endpoint import NcclEndpoint
from kvtransfer.transports.registry import make_connectors
from services.common.config.worker import WorkerConfig
from services.common.engine.channel import EngineEnd
from services.common.engine.launch import EngineLaunch, identity_of
from services.worker.engine.audit import EngineAudit
from services.worker.engine.commands import Commands
from services.worker.engine.components import DecodeComponents, PrefillComponents
from services.worker.engine.decode.admission import AdmissionChecks
from services.worker.engine.decode.block_allocation import BlockAllocation
from services.worker.engine.decode.block_sink import ReservedBlockSink
from services.worker.engine.decode.handoff_receiver import HandoffReceiver
from services.worker.engine.decode.reservation import Reservation
from services.worker.engine.decode.reserved_slots import ReservedSlots
from services.worker.engine.decode.ticket_issuer import TicketIssuer
from services.worker.engine.decode.ticket_table import TicketTable
from services.worker.engine.health import EngineHeartbeat
from services.worker.engine.loop import EngineLoop
from services.worker.engine.prefill.jobs import PrefillJobs
from services.worker.engine.prefill.request_check import RequestCheck
from services.worker.engine.prefill.step_pipeline import PrefillPipeline
from services.worker.engine.startup.kv_wire_format import WireBlocks, wire_blocks
from services.worker.engine.startup.link_setup import device_blocks, nccl_links
from services.worker.engine.startup.model_loader import LoadedModel
from services.worker.engine.startup.prefill_setup import prefill_loop
from services.worker.engine.startup.prefix_cache_setup import prefix_cache
from services.worker.engine.startup.startup_log import capture_logged, log_memory
from services.worker.engine.startup.worker_pool import pool_of
from services.worker.engine.step_clock import StepClock

# Bounds of the link work in one turn of the loop, so that no kind of work starves the others.
_PIECES_A_TURN = 16
_PIECE_BYTES_A_TURN = 8 << 20

OpenReceiver = Callable[[ReservedBlockSink], tuple[Receiver | None, tuple[Endpoint, ...]]]
"""Opens the receiver that writes into a sink, and its endpoints for tickets. None and empty where there is
none."""


@dataclass(frozen=True, slots=True)
class _Links:
    """What the links of a worker share, as senders and as receivers."""

    identity: WorkerIdentity
    auth: LinkAuth
    signer: TicketSigner
    wire: WireBlocks
    device: DeviceBlocks | None  # None where the host moves blocks
    nccl: NcclEndpoint | None
    wakeup: Wakeup
    pieces_a_turn: int


def build_engine(
    launch: EngineLaunch, model: LoadedModel, channel: EngineEnd, memory: SharedMemory
) -> EngineLoop:
    """Builds the engine of one worker and reports it ready to its front. On a GPU this compiles and captures:
    seconds. Raises BatonError(INVALID) where the configuration does not fit the model or the device."""
    config, wakeup = launch.worker, Wakeup()
    links = _links(launch, model, wakeup)
    rings = SharedRings(config.engine.most_slots, config.engine.max_logprobs)
    heartbeat = EngineHeartbeat(rings.heartbeat(memory))
    cache = prefix_cache(model, config, wakeup.set)
    steps, prompts = _step_loops(config, model, rings, memory, cache, heartbeat)
    decode = build_decode(
        model,
        steps,
        SlotPool(model.slots),
        identity=links.identity,
        signer=links.signer,
        wire=links.wire,
        emit=channel.send,
        host_kv_bytes=config.engine.host_kv_mb * 10**6 if config.role != "prefill" else 0,
        reserve_output_tokens=config.engine.reserve_output_tokens,
        prefix_cache=cache,
        open_receiver=lambda sink: _open_receiver(config, links, sink, steps),
    )
    prefill = _build_prefill(config, model, prompts, links, decode, cache, channel)
    audit = EngineAudit(model, decode, prefill, cache, links.wire.block_bytes)
    commands = Commands(channel, config.role, decode, prefill, audit)
    log_memory(model, config.engine)
    channel.send(EngineEvent(ready=_ready(config, model, audit, decode.endpoints, cache)))
    pieces = links.pieces_a_turn
    return EngineLoop(channel, wakeup, heartbeat, commands, decode, prefill, cache, links.nccl, pieces)


def build_decode(
    model: LoadedModel,
    loop: DecodeLoop,
    slots: SlotPool,
    *,
    identity: WorkerIdentity,
    signer: TicketSigner,
    wire: WireBlocks,
    emit: Callable[[EngineEvent], None],
    host_kv_bytes: int,
    reserve_output_tokens: int | None,
    prefix_cache: PrefixCache | None,
    open_receiver: OpenReceiver = lambda sink: (None, ()),
    ticket_clock: Callable[[], float] = time.monotonic,
) -> DecodeComponents:
    """Builds the decode side. `host_kv_bytes`: host memory for sequences that are swapped out."""
    tickets: TicketTable[Reservation] = TicketTable(clock=ticket_clock)
    sink = ReservedBlockSink(tickets, wire)
    receiver, endpoints = open_receiver(sink)
    allocation = BlockAllocation(model.pools, loop, HostBlocks(model.cache, host_kv_bytes))
    reserved = ReservedSlots(tickets, loop, slots, model.pools, allocation, receiver, prefix_cache, emit)
    issuer = TicketIssuer(
        model, identity, signer, tickets, reserved, slots, allocation, receiver, endpoints, wire.block_bytes,
        reserve_output_tokens, prefix_cache,
    )  # fmt: skip
    admissions = AdmissionChecks(model, loop, prefix_cache if receiver is not None else None)
    handoffs = HandoffReceiver(
        loop, tickets, reserved, allocation, admissions, signer, receiver, wire.block_bytes, prefix_cache
    )
    clock = StepClock(lambda: loop.tokens_decoded, ended=lambda: loop.ring.steps + loop.ring.full_steps)
    return DecodeComponents(
        loop, clock, slots, tickets, sink, allocation, receiver, endpoints, reserved, issuer, handoffs
    )


def _links(launch: EngineLaunch, model: LoadedModel, wakeup: Wakeup) -> _Links:
    transfer = launch.worker.transfer
    wire = wire_blocks(model.cache, model.fingerprint, transfer.kv_wire)
    device = device_blocks(model, transfer)
    pieces = _PIECES_A_TURN
    if device is None:  # the host copies every byte of them
        largest = min(max(wire.block_bytes), transfer.piece_bytes)
        pieces = min(_PIECES_A_TURN, max(1, _PIECE_BYTES_A_TURN // largest))
    return _Links(
        identity=identity_of(launch.worker, bytes.fromhex(launch.incarnation), launch.started_ns),
        auth=LinkAuth(launch.worker.cluster_secret),
        signer=TicketSigner(secrets.token_bytes(32)),
        wire=wire,
        device=device,
        nccl=nccl_links(device, transfer.transport),
        wakeup=wakeup,
        pieces_a_turn=pieces,
    )


def _step_loops(
    config: WorkerConfig,
    model: LoadedModel,
    rings: SharedRings,
    memory: SharedMemory,
    cache: PrefixCache | None,
    heartbeat: EngineHeartbeat,
) -> tuple[DecodeLoop, PrefillLoop]:
    """Both loops; the one that a worker's role does not need compiles and captures nothing."""
    decodes, prefills = config.role != "prefill", config.role != "decode"
    widths = tuple(group.blocks_for(model.max_context_tokens) for group in model.layout.groups)
    # As wide as the vocabulary: kept small where no slot is ever used.
    state = SlotState(model.slots if decodes else 1, widths, model.config.vocab_size, model.device)
    with capture_logged(model.device):
        steps = decode_loop(
            model.decoder,
            model.cache,
            state,
            rings,
            memory,
            exact=model.exact,
            serves=decodes,
            before_step=heartbeat.step,
        )
        prompts = prefill_loop(model, config.engine, cache, serves=prefills, before_step=heartbeat.step)
    return steps, prompts


def _open_receiver(
    config: WorkerConfig, links: _Links, sink: ReservedBlockSink, loop: DecodeLoop
) -> tuple[Receiver | None, tuple[Endpoint, ...]]:
    """Listens where the role is decode; no other role receives blocks over links."""
    if config.role != "decode":
        return None, ()
    transfer, device = config.transfer, None
    if links.device is not None:
        device = DeviceSink(links.device, sink.place, steps_run=lambda: loop.has_work)
    receiver = Receiver(
        identity=links.identity,
        fingerprint=links.wire.fingerprint,
        signer=links.signer,
        block_bytes=links.wire.block_bytes,
        piece_bytes=links.wire.piece_bytes(transfer.piece_bytes),
        window_pieces=transfer.window_pieces,
        sink=sink,
        wake=links.wakeup.set,
        peer_timeout_s=transfer.peer_timeout_s,
        device=device,
    )
    endpoints = receiver.listen(
        config.host,
        transfer.transfer_port,
        transport=transfer.transport,
        nccl=links.nccl,
        auth=links.auth,
        frames_port=transfer.frames_port,
    )
    return receiver, endpoints


def _build_prefill(
    config: WorkerConfig,
    model: LoadedModel,
    loop: PrefillLoop,
    links: _Links,
    decode: DecodeComponents,
    cache: PrefixCache | None,
    channel: EngineEnd,
) -> PrefillComponents:
    transfer = config.transfer
    sender = Sender(
        identity=links.identity,
        fingerprint=links.wire.fingerprint,
        block_bytes=links.wire.block_bytes,
        source=_PinnedBlocks(model, links.wire),
        peer_timeout_s=transfer.peer_timeout_s,
        wake=links.wakeup.set,
        connectors=make_connectors(
            transfer.transport, links.wakeup.set, links.device, links.nccl, links.auth
        ),
    )
    check = RequestCheck(model, cache, shared_prefix_secret=bool(config.prefix_secret))
    local = decode.handoffs if config.role == "both" else None
    incarnation = links.identity.incarnation
    jobs = PrefillJobs(model, loop.scheduler, sender, check, incarnation, local, channel.send)
    pipeline = PrefillPipeline(jobs, loop, sender, links.pieces_a_turn if links.device is not None else 0)
    clock = StepClock(lambda: loop.tokens_run, ended=lambda: loop.steps_ended)
    return PrefillComponents(loop, clock, sender, jobs, pipeline)


class _PinnedBlocks:
    """The sender's `BlockSource`: pinned blocks of the cache."""

    def __init__(self, model: LoadedModel, wire: WireBlocks) -> None:
        self._pools = model.pools.pools
        self.read = wire.read

    def unpin(self, group: int, block: int) -> None:
        self._pools[group].unpin(block)


def _ready(
    config: WorkerConfig,
    model: LoadedModel,
    audit: EngineAudit,
    endpoints: tuple[Endpoint, ...],
    cache: PrefixCache | None,
) -> ReadyEvent:
    return ReadyEvent(
        fingerprint=model.fingerprint,
        max_context_tokens=model.max_context_tokens,
        vocab_size=model.config.vocab_size,
        load=audit.load(),
        device=str(model.device),
        transfer_endpoints=[endpoint.message() for endpoint in endpoints],
        cache_dtype=model.layout.cache_dtype if cache is not None else "",
        pool=pool_of(config, model),
        weight_format=model.weight_format,
    )
