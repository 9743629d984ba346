"""Router processes report to each other what they have at the workers, by datagrams over Unix sockets.

    c  claims    everything that a process has at any worker now, so that a lost datagram does no harm: sent
                 soon after a change, and a few times a second
    p  prompt    block hashes of a prompt that was sent to a worker, or of a sequence that one has decoded
    l  link      a handoff over a link failed, or succeeded again

No process waits for a datagram, and one for which a receiver has no room is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from services.common.config.router import GroupMember
from services.router.placement.prefill_division import PrefillDivision
from services.router.placement.prefix_affinity import PrefixAffinity
from services.router.queue.waiting_queue import WaitingQueue
from services.router.workers.backlog import (
    LENGTHS,
    NO_BACKLOG,
    NO_PROMPTS,
    BacklogPart,
    Queued,
    SecondsByLength,
    all_seconds,
    prompts_of,
)
from services.router.workers.other_claims import Precedence, SiblingCounts
from services.router.workers.recent_mean import Sum
from services.router.workers.worker import Worker

# After a change. Less than an early prefill's head start: others know of a slot before its worker does.
SOON_S = 0.002
_HEARTBEAT_S = 0.25
# Seconds without a datagram after which a sibling has ended. Its slots count as those of other routers until
# workers end what it ran.
_SILENT_S = 1.0
# Read at once, so that siblings cannot hold up the event loop.
_MOST_READ = 64
_DATAGRAM_BYTES = 192 * 1024
# Hashes of the beginning of a prompt; later ones are not sent.
_MOST_HASHES = 4096
_HASH_BYTES = 16

# Kind, index of the process; of claims also: how many requests run or wait, how many wait for prefill, how
# many wait in all, the precedence of the first that waits and is not late, whose time is infinite without
# any, and whether workers compute their own prompts; then seconds of the prompts that wait, by length, and
# the sums of the means of `PrefillDivision`.
_HEAD, _LOAD, _SUM = struct.Struct("<cB"), struct.Struct("<IIIid?"), struct.Struct("<Id")
_PROMPTS = struct.Struct(f"<{LENGTHS}f")
# Incarnation; slots, tokens in them, tokens and prompts queued for prefill, share of its time that recent
# prompts took, slots released per second; the sum of what `tpot_ratio` observed; its part of the backlog.
_CLAIM = struct.Struct(f"<16sIQQIffIddd{LENGTHS}f")
_NONE_WAITS = Precedence(0, math.inf)
_CLAIMS, _PROMPT, _LINK = b"c", b"p", b"l"
# Incarnations of a prefill and a decode worker; then why their link failed, in at most `_REASON_BYTES`.
_PAIR = struct.Struct("<16s16s")
_REASON_BYTES = 1024


class OwnLoad(NamedTuple):
    """Load of this process: requests that run or wait; those that wait for prefill, and in all; the
    precedence of the first of them that is not late, and seconds of their prompts."""

    running: int
    waiting_for_prefill: int
    queued: int
    first: Precedence | None
    prompts: SecondsByLength = NO_PROMPTS

    @classmethod
    def of(cls, running: int, queue: WaitingQueue) -> OwnLoad:
        """Reads the load of this process from its queue."""
        return cls(running, queue.waiting_for_prefill, queue.waiting, queue.first_waiting, queue.prompts)


class _Claims(NamedTuple):
    """Claims of one process on one worker; `ratios`: the sum of what its `tpot_ratio` observed; `backlog`: of
    its prompts there."""

    slots: int = 0
    context: int = 0
    queued_tokens: int = 0
    queued_prompts: int = 0
    prefill_share: float = 0.0
    released_per_second: float = 0.0
    ratios: Sum = Sum()
    backlog: BacklogPart = NO_BACKLOG

    @classmethod
    def of(cls, worker: Worker) -> _Claims:
        return cls(
            worker.claimed_slots,
            worker.claimed_context,
            worker.queued_tokens,
            worker.backlog.prompts,
            worker.prefill_share.own,
            worker.turnover.own,
            worker.tpot_ratio.own,
            worker.backlog.own,
        )

    @classmethod
    def unpacked(cls, values: tuple[Any, ...]) -> _Claims:
        """Restores the claims from what `packed` returned."""
        slots, context, tokens, prompts, share, released, count, total, added_s, unfinished_s, *left = values
        backlog = BacklogPart(added_s, unfinished_s, tuple(left))
        return cls(slots, context, tokens, prompts, share, released, Sum(count, total), backlog)

    @property
    def packed(self) -> tuple[Any, ...]:
        """The values, one behind the other."""
        added_s, unfinished_s, left = self.backlog
        return (*self[:-2], *self.ratios, added_s, unfinished_s, *left)


@dataclass(frozen=True, slots=True)
class _Report:
    """The latest report of one sibling. `claims`: by the incarnation of the worker."""

    load: OwnLoad
    own_prompts: bool
    claims: Mapping[bytes, _Claims] = field(default_factory=dict)


class SiblingView:
    """One process's view of its siblings, which it applies to workers and to prefix affinity."""

    def __init__(
        self,
        member: GroupMember,
        workers: Callable[[], Sequence[Worker]],
        prefixes: PrefixAffinity,
        division: PrefillDivision,
        load: Callable[[], OwnLoad],
    ) -> None:
        self._member = member
        self._workers = workers
        self._prefixes = prefixes
        self._division = division
        self._load = load
        self._paths = [_path(member, i) for i in range(member.count) if i != member.index]
        self._reports: dict[int, tuple[float, _Report]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._soon: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._sent = b""

    @property
    def running(self) -> int:
        """Requests that run or wait at siblings."""
        return sum(report.load.running for _, report in self._reports.values())

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill worker at siblings."""
        return sum(report.load.waiting_for_prefill for _, report in self._reports.values())

    @property
    def queued(self) -> Queued:
        """Requests that wait at siblings, their prompts by length."""
        loads = [report.load for _, report in self._reports.values()]
        prompts = all_seconds([load.prompts for load in loads])
        return Queued(sum(load.queued for load in loads), sum(prompts), prompts_of(prompts))

    def start(self) -> None:
        """Binds the socket and begins to send; call it on the event loop."""
        path = _path(self._member, self._member.index)
        Path(path).unlink(missing_ok=True)  # of the process that this one replaces
        self._socket.bind(path)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        self._prefixes.on_sent = self._send_prompt
        self._beating = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        """Stops the beats and closes the socket."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            asyncio.get_running_loop().remove_reader(self._socket)
            self._beating = None
        if self._soon is not None:
            self._soon.cancel()
        self._socket.close()

    def changed(self) -> None:
        """Sends a report to siblings soon: counters of this process have changed."""
        if self._soon is None and self._beating is not None:
            self._soon = asyncio.get_running_loop().call_later(SOON_S, self._send_changes)

    def _send_changes(self) -> None:
        self._soon = None
        self._send_links()
        if (claims := self._claims()) != self._sent:
            self._send(claims)
            self._sent = claims

    async def _beat(self) -> None:
        while True:
            self._send_links()
            self._sent = self._claims()
            self._send(self._sent)
            now = time.monotonic()
            for index in [i for i, (at, _) in self._reports.items() if now - at > _SILENT_S]:
                del self._reports[index]
            self._apply()
            await asyncio.sleep(_HEARTBEAT_S)

    def _claims(self) -> bytes:
        load = self._load()
        counts = load.running, load.waiting_for_prefill, load.queued
        parts = [
            _HEAD.pack(_CLAIMS, self._member.index),
            _LOAD.pack(*counts, *(load.first or _NONE_WAITS), self._division.own_prompts),
            _PROMPTS.pack(*load.prompts),
            *(_SUM.pack(*mean.own) for mean in self._division.means),
        ]
        for worker in self._workers():
            incarnation = worker.identity.incarnation
            claims = _Claims.of(worker)
            if claims != _Claims() and len(incarnation) == _HASH_BYTES:
                parts.append(_CLAIM.pack(incarnation, *claims.packed))
        return b"".join(parts)

    def _send_prompt(self, worker: Worker, hashes: Sequence[bytes]) -> None:
        incarnation = worker.identity.incarnation
        if len(incarnation) == _HASH_BYTES:
            head = _HEAD.pack(_PROMPT, self._member.index)
            self._send(head + incarnation + b"".join(hashes[:_MOST_HASHES]))

    def _send_links(self) -> None:
        head = _HEAD.pack(_LINK, self._member.index)
        for worker in self._workers():
            for decode, reason in worker.links.take_news():
                pair = _PAIR.pack(worker.identity.incarnation, decode.identity.incarnation)
                self._send(head + pair + reason.encode()[:_REASON_BYTES])

    def _send(self, datagram: bytes) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):  # it has ended, or does not keep up
                self._socket.sendto(datagram, path)

    def _read(self) -> None:
        for _ in range(_MOST_READ):
            try:
                datagram = self._socket.recv(_DATAGRAM_BYTES)
            except OSError:
                return
            self.receive(datagram)

    def receive(self, datagram: bytes) -> None:
        """Takes a sibling's datagram; ignores one that is malformed."""
        with contextlib.suppress(struct.error):
            kind, index = _HEAD.unpack_from(datagram)
            body = memoryview(datagram)[_HEAD.size :]
            if kind == _CLAIMS and index != self._member.index:
                self._take(index, body)
                self._apply()
            elif kind == _PROMPT:
                self._learn(bytes(body[:_HASH_BYTES]), list(_pieces(body[_HASH_BYTES:])))
            elif kind == _LINK:
                self._learn_link(_PAIR.unpack_from(body), bytes(body[_PAIR.size :]))

    def _take(self, index: int, body: memoryview) -> None:
        """Takes the claims of a sibling. Raises struct.error where they are malformed."""
        running, for_prefill, queued, priority, since, own_prompts = _LOAD.unpack_from(body)
        prompts = _PROMPTS.unpack_from(body, _LOAD.size)
        body = body[_LOAD.size + _PROMPTS.size :]
        means = self._division.means
        sums = [Sum(*_SUM.unpack_from(body, i * _SUM.size)) for i in range(len(means))]
        claims = {
            one[0]: _Claims.unpacked(one[1:]) for one in _CLAIM.iter_unpack(body[len(sums) * _SUM.size :])
        }
        load = OwnLoad(running, for_prefill, queued, Precedence(priority, since), prompts)
        self._reports[index] = time.monotonic(), _Report(load, own_prompts, claims)
        for mean, reported in zip(means, sums, strict=True):
            mean.take(index, reported)
        for worker in self._workers():
            if worker.identity.incarnation in claims:
                worker.tpot_ratio.take(index, claims[worker.identity.incarnation].ratios)

    def _learn(self, incarnation: bytes, hashes: Sequence[bytes]) -> None:
        for worker in self._workers():
            if worker.identity.incarnation == incarnation:
                self._prefixes.sibling_sent(worker, hashes)

    def _learn_link(self, pair: tuple[bytes, ...], reason: bytes) -> None:
        prefill, decode = pair
        known = {worker.identity.incarnation: worker for worker in self._workers()}
        if prefill in known and decode in known:
            known[prefill].links.learned(known[decode], reason.decode(errors="replace"))

    def _apply(self) -> None:
        """Gives every worker the siblings' claims there, and the division what the first process says."""
        reports = [report for _, report in self._reports.values()]
        first_index = min(self._reports, default=self._member.index)
        is_first = first_index >= self._member.index
        self._division.first_process = None if is_first else self._reports[first_index][1].own_prompts
        firsts = (report.load.first or _NONE_WAITS for report in reports)
        waiting = tuple(first for first in firsts if first.since < math.inf)
        changed: list[Worker] = []
        for worker in self._workers():
            incarnation = worker.identity.incarnation
            claims = [report.claims.get(incarnation, _Claims()) for report in reports]
            counts = SiblingCounts(
                processes=len(reports),
                slots=sum(claim.slots for claim in claims),
                context=sum(claim.context for claim in claims),
                queued_tokens=sum(claim.queued_tokens for claim in claims),
                queued_prompts=sum(claim.queued_prompts for claim in claims),
                backlog=BacklogPart.of([claim.backlog for claim in claims]),
                prefill_share=sum(claim.prefill_share for claim in claims),
                released_per_second=sum(claim.released_per_second for claim in claims),
                waiting=waiting,
            )
            if worker.set_siblings(counts):
                changed.append(worker)
        if changed:
            changed[0].changed()  # of one for all, once all are known: requests look at every worker then


def _pieces(data: memoryview) -> Iterator[bytes]:
    return (bytes(data[at : at + _HASH_BYTES]) for at in range(0, len(data), _HASH_BYTES))


def _path(member: GroupMember, index: int) -> str:
    return f"{member.folder}/{index}.claims"
