"""Transfers that end without a commit, or whose link breaks: what is reported, and what continues."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from baton.base.errors import BatonError, ErrorKind
from kvtransfer.protocol import frames
from kvtransfer.protocol.frames import Stop, StopReason, Withdraw, WithdrawReason
from kvtransfer.receiver.events import CommitPending, Committed, TransferStarted, Withdrawn
from tests.kvtransfer.support.receiving_end import LinkRig, ReceivingEnd


@pytest.fixture
def end() -> ReceivingEnd:
    return ReceivingEnd()


@pytest.fixture
def rig() -> LinkRig:
    return LinkRig("prefill-0")


def test_a_sender_withdraws_its_transfer(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 1])
    for count, reason in enumerate((WithdrawReason.ABORTED, WithdrawReason.FINISHED)):
        end.handle(rig, Withdraw(1, reason))
        assert end.counters.dropped_unknown == count
    assert end.take_events() == [Withdrawn(1, WithdrawReason.ABORTED, "the sender withdrew")]
    assert (rig.take_sent(), rig.link.transfers, len(end.transfers)) == ([], set(), 0)


def test_a_committed_transfer_is_not_withdrawn(end: ReceivingEnd, rig: LinkRig) -> None:
    end.bind(rig, 1, [0, 0])
    record = end.commit(rig, 1, [0, 0])
    end.handle(rig, Withdraw(1, WithdrawReason.ABORTED))
    assert end.take_events() == [Committed(1, record)]
    assert (end.counters.dropped_unknown, len(end.transfers)) == (1, 1)


def test_a_forgotten_transfer_is_reported_to_its_sender_alone(end: ReceivingEnd, rig: LinkRig) -> None:
    for transfer in (1, 2):
        end.bind(rig, transfer, [0, 1])
        end.send(rig, (transfer, 1, 0, 0), b"cccc")
    rig.take_sent()
    end.transfers.forget(1)
    end.transfers.forget(1)
    assert rig.take_sent() == [Stop(1, StopReason.UNKNOWN)]
    assert end.take_events() == [TransferStarted(2)]
    assert (rig.link.transfers, len(end.transfers)) == ({2}, 1)
    end.transfers.expect(3, [0, 0], [])
    end.transfers.forget(3)  # without any frame of a sender
    assert (rig.take_sent(), len(end.transfers)) == ([], 1)


def test_a_link_that_breaks_ends_its_own_transfers_alone(end: ReceivingEnd, rig: LinkRig) -> None:
    other = LinkRig("prefill-1")
    for transfer in (9, 3):
        end.bind(rig, transfer, [0, 1])
    for transfer, over in ((4, rig), (5, other)):
        end.bind(over, transfer, [0, 0])
        end.commit(over, transfer, [0, 0])
    end.bind(other, 6, [0, 1])
    end.take_events()
    end.transfers.link_broke(rig.link, BatonError(ErrorKind.UNAVAILABLE, "cut"))
    assert end.take_events() == [Withdrawn(n, WithdrawReason.LINK_LOST, "cut") for n in (3, 9)]
    assert (rig.link.transfers, other.link.transfers, len(end.transfers)) == (set(), {6}, 3)
    for transfer in (4, 5):
        end.transfers.acknowledge(transfer)
    assert (rig.take_sent(), other.take_sent()) == ([], [frames.CommitAck(5, ANY)])


def test_only_commits_that_a_device_delays_are_reported_as_pending(end: ReceivingEnd, rig: LinkRig) -> None:
    """On the host a received piece is there, so no commit is pending."""
    end.bind(rig, 1, [0, 1])
    assert not end.transfers.all_commits_received(rig.link)
    end.send(rig, (1, 1, 0, 0), b"cccc")
    end.commit(rig, 1, [0, 1])
    assert not any(isinstance(event, CommitPending) for event in end.take_events())
    assert not end.transfers.all_commits_received(rig.link), "its only transfer has been committed"
