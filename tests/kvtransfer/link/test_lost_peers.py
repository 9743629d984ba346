"""A peer is killed or frozen at every stage of a transfer at once, and a healthy one works on meanwhile.

One peer a stage, each a process of its own, all struck at the same time; the survivor is this process.
With the default time-outs of workers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from _pytest.mark import ParameterSet

from baton.base.errors import ErrorKind
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.receiver.events import Committed, Withdrawn
from kvtransfer.sender.events import Acknowledged, Failed
from kvtransfer.sender.transfer import Transfer
from tests.kvtransfer.conftest import BETWEEN_GPUS, ON_CUDA, OVER_NCCL
from tests.kvtransfer.support.device_rigs import rig_of
from tests.kvtransfer.support.owned_blocks import Sink, Source
from tests.kvtransfer.support.staged_peer import (
    BLOCKS,
    STAGES,
    WINDOW,
    blocks_on,
    commit,
    listen,
    make_receiver,
    make_sender,
    push,
    ticket_for,
)

HOW = [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="frozen")]
SLOW = pytest.param("ipc", marks=pytest.mark.slow)
FAKE_DEVICE = pytest.param("ipc-fake", marks=pytest.mark.slow)
BACK_S = 3.0  # all but quarantined staging is free again
LINKED_S = 5.0  # a restarted peer has linked again, from its ready on
_START_S = 60.0


def on_gpus(how: signal.Signals, name: str) -> list[ParameterSet]:
    return [
        pytest.param(how, "ipc-cuda", id=f"{name}-cuda", marks=pytest.mark.gpu),
        pytest.param(how, "ipc-peer", id=f"{name}-peer", marks=pytest.mark.multigpu),
    ]


def by_nccl(how: signal.Signals, name: str) -> list[ParameterSet]:
    return [
        pytest.param(how, *over.values, id=f"{name}-{over.values[0]}", marks=over.marks) for over in OVER_NCCL
    ]


class Remote:
    """A peer in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.kvtransfer.support.staged_peer", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._bytes = b""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def output(self) -> list[str]:
        """Complete lines of the process's output so far."""
        return self._bytes.decode().split("\n")[:-1]

    def receive(self) -> None:
        """Reads what it has printed meanwhile."""
        assert self.process.stdout is not None
        self._bytes += self.process.stdout.read() or b""

    def printed(self, word: str) -> bool:
        self.receive()
        return word in self.output

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(5)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def remotes() -> Iterator[Callable[..., Remote]]:
    """Starts peers, and ends them all."""
    with ExitStack() as stack:

        def start(*arguments: object) -> Remote:
            remote = Remote(*map(str, arguments))
            stack.callback(remote.end)
            return remote

        yield start


class Survivor(ABC):
    """A side of a link: a loop that is turned until a condition holds."""

    def __init__(self) -> None:
        self.woken = threading.Event()

    @abstractmethod
    def poll(self) -> None:
        """One turn of the loop."""

    @abstractmethod
    def busy_poll(self) -> bool: ...

    def until(self, holds: Callable[[], bool], within_s: float, what: Callable[[], object] = str) -> float:
        """Turns the loop until it holds; how long that took."""
        begun = time.monotonic()
        while not holds():
            assert time.monotonic() < begun + within_s, f"not within {within_s} s: {what()}"
            self.poll()
            self.woken.wait(0.001 if self.busy_poll() else 0.02)
            self.woken.clear()
        return time.monotonic() - begun


class ReceivingSurvivor(Survivor):
    """Expects transfer 10 + n of the peer at stage n, and every one of the healthy peer's, from 1000 on."""

    def __init__(self, transport: str) -> None:
        super().__init__()
        rig = rig_of(transport, at_once=True)
        self.sink = blocks_on(rig, Sink, 8 * BLOCKS)
        self.receiver = make_receiver(1, self.sink, self.woken, rig)
        self.address = listen(self.receiver, transport, self.woken, rig)
        self.admitted: Counter[int] = Counter()
        self.withdrawn: dict[int, WithdrawReason] = {}

    def expect(self, transfer: int, blocks: int) -> None:
        self.sink.reserve(transfer, [blocks])
        self.receiver.transfers.expect(transfer, [blocks])

    def poll(self) -> None:
        for event in self.receiver.poll(16):
            if isinstance(event, Withdrawn):
                self.withdrawn[event.transfer_id] = event.reason
                self.sink.release(event.transfer_id)
            elif isinstance(event, Committed):
                self.sink.check(event.transfer_id, self.sink.places[event.transfer_id])
                self.sink.release(event.transfer_id)
                self.admitted[event.transfer_id] += 1
                if event.transfer_id >= 1000:
                    self.expect(event.transfer_id + 1, BLOCKS)
                self.receiver.transfers.acknowledge(event.transfer_id)

    def busy_poll(self) -> bool:
        return self.receiver.busy_poll

    def worked(self) -> int:
        return sum(count for transfer, count in self.admitted.items() if transfer >= 1000)

    def open_links(self) -> int:
        return sum(not link.quarantined_pieces for link in self.receiver.links)


@pytest.mark.parametrize(
    ("how", "over"),
    [
        pytest.param(signal.SIGKILL, "grpc", id="killed", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "grpc", id="frozen", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, "ipc", id="killed-ipc", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "ipc", id="frozen-ipc"),
        pytest.param(signal.SIGKILL, "ipc-fake", id="killed-fake", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "ipc-fake", id="frozen-fake", marks=pytest.mark.slow),
        *on_gpus(signal.SIGKILL, "killed"),
        *on_gpus(signal.SIGSTOP, "frozen"),
        *by_nccl(signal.SIGKILL, "killed"),
        *by_nccl(signal.SIGSTOP, "frozen"),
    ],
)
def test_senders(how: signal.Signals, over: str) -> None:
    survivor = ReceivingSurvivor(over)
    with remotes() as start:
        survivor.expect(1000, BLOCKS)
        healthy = start("send", "healthy", 1, survivor.address, 1000, "works", over)
        peers = {}
        for number, stage in enumerate(STAGES):
            survivor.expect(10 + number, 0 if stage == "linked" else BLOCKS)
            peers[stage] = start("send", f"peer-{stage}", 1, survivor.address, 10 + number, stage, over)
        survivor.until(lambda: all(peer.printed(stage) for stage, peer in peers.items()), _START_S)
        survivor.until(lambda: survivor.worked() > 3, _START_S)
        assert survivor.admitted[10] == survivor.admitted[13] == 1
        worked = survivor.worked()
        for peer in peers.values():
            peer.signal(how)

        # Over shared memory one that is frozen may write on when it wakes: its window stays quarantined.
        may_write = over.startswith("ipc") and how is signal.SIGSTOP
        kept = len(STAGES) if may_write else 0
        # What the two open transfers held is free again; every other window of the four is fenced and gone.
        took = survivor.until(
            lambda: (
                set(survivor.withdrawn) == {11, 12}
                and survivor.open_links() == 1
                and len(survivor.receiver.links) == 1 + kept
            ),
            BACK_S,
            lambda: survivor.receiver.links,
        )
        print(f"{how.name} over {over}: senders gone after {took:.2f} s")
        assert set(survivor.withdrawn.values()) == {WithdrawReason.LINK_LOST}
        assert survivor.receiver.counters.links_fenced == len(STAGES) - kept
        quarantined = [link for link in survivor.receiver.links if link.quarantined_pieces]
        assert {link.quarantined_pieces for link in quarantined} <= {WINDOW}
        assert len(survivor.sink.places) == 1  # the healthy one's next
        survivor.until(lambda: survivor.worked() > worked + 3, BACK_S)
        assert healthy.process.poll() is None
        assert "failed" not in healthy.output

        again = start("send", "peer-receiving", 2, survivor.address, 20, "committed", over)
        survivor.expect(20, BLOCKS)
        survivor.until(lambda: again.printed("ready"), _START_S)
        survivor.until(lambda: again.printed("committed"), LINKED_S)
        if how is signal.SIGSTOP:  # resumed, the old ones find their links broken, and do no harm
            open_ones = (peers["receiving"], peers["sent"])
            for peer in open_ones:
                peer.signal(signal.SIGCONT)
            survivor.until(lambda: all(peer.printed("failed") for peer in open_ones), LINKED_S)
        if may_write:  # they reported to have unmapped it, or ended before: the fence
            survivor.until(lambda: survivor.receiver.counters.links_fenced == 2, LINKED_S)
            for stage in ("linked", "committed"):
                peers[stage].signal(signal.SIGKILL)
            survivor.until(lambda: survivor.receiver.counters.links_fenced == len(STAGES), BACK_S)
        assert survivor.sink.foreign_bytes == 0
    survivor.receiver.close()


class SendingSurvivor(Survivor):
    """One sender with a link to every receiver."""

    def __init__(self, transport: str) -> None:
        super().__init__()
        rig = rig_of(transport, at_once=True)
        self.source = blocks_on(rig, Source, 8 * BLOCKS)
        self.sender = make_sender("sender", 1, self.source, self.woken, rig, transport)
        self.acknowledged: list[Transfer] = []
        self.failed: dict[Transfer, ErrorKind] = {}
        self.healthy: tuple[str, int] | None = None

    def begin(self, address: str, incarnation: int, transfer: int, ordinals: range) -> Transfer:
        begun = self.sender.begin(*ticket_for(address, incarnation, transfer, BLOCKS))
        push(begun, self.source, ordinals)
        return begun

    def work(self, address: str, transfer: int) -> None:
        """Keeps one transfer to the healthy receiver under way."""
        self.healthy = address, transfer
        commit(self.begin(address, 1, transfer, range(BLOCKS)))

    def poll(self) -> None:
        for event in self.sender.poll(16):
            if isinstance(event, Failed):
                self.failed[event.transfer] = event.error.kind
            elif isinstance(event, Acknowledged):
                self.acknowledged.append(event.transfer)
                if self.healthy is not None and event.transfer.transfer_id == self.healthy[1]:
                    self.work(self.healthy[0], self.healthy[1] + 1)

    def busy_poll(self) -> bool:
        return self.sender.busy_poll

    def worked(self) -> int:
        return self.healthy[1] if self.healthy is not None else 0

    def credits_home(self) -> bool:
        return all(link.free_pieces == WINDOW for link in self.sender.links)


@pytest.mark.parametrize("over", ["grpc", SLOW, FAKE_DEVICE, ON_CUDA, BETWEEN_GPUS, *OVER_NCCL])
@pytest.mark.parametrize("how", [pytest.param(*HOW[0].values, id="killed", marks=pytest.mark.slow), HOW[1]])
def test_receivers(how: signal.Signals, over: str) -> None:
    survivor = SendingSurvivor(over)
    with remotes() as start:
        healthy = start("receive", 1, 1000, 1, over)
        # After its commit: once unanswered, once answered.
        stages = (*STAGES, "asked")
        peers = {stage: start("receive", 1, 1, int(stage == "committed"), over) for stage in stages}
        everyone = (healthy, *peers.values())
        survivor.until(lambda: all(_spoke(peer) for peer in everyone), _START_S)
        begun = {}
        for stage, peer in peers.items():
            transfer = survivor.begin(peer.output[0], 1, 1, _pushed(stage))
            begun[stage] = transfer
            if stage in ("committed", "asked"):
                commit(transfer)
        survivor.until(lambda: not survivor.source.pins, _START_S)
        survivor.until(survivor.credits_home, _START_S)
        survivor.until(lambda: survivor.acknowledged == [begun["committed"]], _START_S)
        survivor.work(healthy.output[0], 1000)
        survivor.until(lambda: survivor.worked() > 1003, _START_S)
        worked = survivor.worked()
        for peer in peers.values():
            peer.signal(how)
        rest = range(BLOCKS // 2, BLOCKS)
        push(begun["receiving"], survivor.source, rest)  # the next chunk is ready, and has no receiver

        open_ones = {begun[stage] for stage in peers if stage != "committed"}
        took = survivor.until(
            lambda: set(survivor.failed) == open_ones and len(survivor.sender.links) == 1,
            BACK_S,
            lambda: (survivor.sender.links, survivor.failed),
        )
        print(f"{how.name} over {over}: receivers gone after {took:.2f} s")
        assert set(survivor.failed.values()) == {ErrorKind.UNAVAILABLE}
        survivor.until(lambda: survivor.worked() > worked + 3, BACK_S)
        assert all(transfer.transfer_id >= 1000 or not transfer.active for transfer in begun.values())

        again = start("receive", 2, 5, 1, over)
        survivor.until(lambda: _spoke(again), _START_S)
        late = survivor.begin(again.output[0], 2, 5, range(BLOCKS))
        commit(late)
        survivor.until(lambda: late in survivor.acknowledged, LINKED_S)
    survivor.sender.close()
    assert survivor.source.pins == 0


@pytest.mark.parametrize("over", ["grpc", SLOW, FAKE_DEVICE, ON_CUDA, BETWEEN_GPUS, *OVER_NCCL])
def test_a_receiver_that_freezes_before_its_link_is_open(over: str) -> None:
    """The receiver's port still accepts connections, and does not answer."""
    survivor = SendingSurvivor(over)
    with remotes() as start:
        peer = start("receive", 1, 1, 1, over)
        survivor.until(lambda: _spoke(peer), _START_S)
        peer.signal(signal.SIGSTOP)
        transfer = survivor.begin(peer.output[0], 1, 1, range(BLOCKS))
        survivor.until(lambda: transfer in survivor.failed, BACK_S)
        assert survivor.failed[transfer] is ErrorKind.UNAVAILABLE
        assert survivor.source.pins == 0
        assert survivor.sender.links == []
    survivor.sender.close()


def _spoke(peer: Remote) -> bool:
    peer.receive()
    return bool(peer.output)


def _pushed(stage: str) -> range:
    if stage == "linked":
        return range(0)
    return range(BLOCKS // 2 if stage == "receiving" else BLOCKS)
