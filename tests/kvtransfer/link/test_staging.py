from __future__ import annotations

import weakref

import numpy as np
import pytest

from kvtransfer.link.staging import Owner, Staging
from kvtransfer.protocol.frames import FrameError, Piece
from kvtransfer.protocol.piece_geometry import max_pieces_per_transfer


def piece(index: int, length: int = 8, transfer: int = 1) -> Piece:
    return Piece(transfer, 0, 0, 0, length, index, 0)


def land(staging: Staging, index: int, data: bytes = b"abcdefgh", transfer: int = 1) -> None:
    staging.store(piece(index, len(data), transfer), memoryview(data))


def test_an_index_changes_hands() -> None:
    staging = Staging(4, 8)
    land(staging, 2)
    assert bytes(staging.view(2, 8)) == b"abcdefgh"
    assert staging.view(2, 8).readonly
    assert (staging.count(Owner.SENDER), staging.count(Owner.RECEIVER)) == (3, 1)
    staging.free(2)
    assert staging.count(Owner.SENDER) == 4


def test_payloads_are_kept_until_their_index_is_freed() -> None:
    staging, data = Staging(4, 8), np.arange(8, dtype=np.uint8)
    alive = weakref.ref(data)
    staging.store(piece(2), data.data)
    del data
    assert bytes(staging.view(2, 3)) == b"\0\1\2"
    staging.free(2)
    assert alive() is None


def test_an_index_under_verification_cannot_be_overwritten() -> None:
    staging = Staging(4, 8)
    land(staging, 2)
    with pytest.raises(FrameError, match=r"^malformed frame: staging index 2 is not the sender's$"):
        land(staging, 2, b"zzzzzzzz")
    assert bytes(staging.view(2, 8)) == b"abcdefgh"
    with pytest.raises(FrameError):
        land(staging, 4)


def test_a_piece_may_not_reach_into_the_next() -> None:
    staging = Staging(4, 8)
    with pytest.raises(FrameError, match=r"^malformed frame: 9 bytes do not fit a piece of 8$"):
        land(staging, 0, b"123456789")


def test_one_transfer_occupies_at_most_half() -> None:
    staging = Staging(5, 8)
    land(staging, 0)
    land(staging, 1)
    with pytest.raises(FrameError, match=r"one transfer occupies more than 2 of 5 staging pieces$"):
        land(staging, 2)
    land(staging, 2, transfer=2)
    staging.free(0)
    land(staging, 3)


def test_nothing_is_freed_twice() -> None:
    staging = Staging(2, 8)
    with pytest.raises(AssertionError, match=r"^staging index 0 freed twice$"):
        staging.free(0)


def test_quarantine_ends_only_with_the_window() -> None:
    staging = Staging(4, 8)
    land(staging, 0)
    staging.quarantine()
    assert (staging.count(Owner.QUARANTINED), staging.count(Owner.RECEIVER)) == (3, 1)
    with pytest.raises(FrameError):
        land(staging, 1)
    staging.release()
    assert staging.count(Owner.QUARANTINED) == 4
    with pytest.raises(AssertionError):
        staging.view(0, 8)


def test_a_window_has_at_least_two_pieces() -> None:
    with pytest.raises(ValueError, match=r"^a window of staging has at least two pieces$"):
        Staging(1, 8)
    assert Staging(2, 8).max_per_transfer == 1


def test_a_transfer_between_devices_may_fill_the_window() -> None:
    assert Staging(6, 8, between_devices=True).max_per_transfer == max_pieces_per_transfer(
        6, between_devices=True
    )
    assert Staging(6, 8).max_per_transfer == max_pieces_per_transfer(6, between_devices=False) == 3


def test_a_window_that_senders_write_is_viewed_in_place() -> None:
    window = np.arange(32, dtype=np.uint8)
    staging = Staging(4, 8, window)
    staging.take(piece(3, 5))
    assert bytes(staging.view(3, 5)) == bytes(range(24, 29))
    assert staging.view(3, 5).readonly
    with pytest.raises(FrameError, match=r"^malformed frame: staging index 3 is not the sender's$"):
        staging.take(piece(3, 5))
    staging.free(3)
    staging.take(piece(3, 8))
    with pytest.raises(ValueError, match=r"^a window of 31 bytes for 4 pieces of 8$"):
        Staging(4, 8, window[:31])


def test_freeing_a_piece_lowers_its_transfers_count() -> None:
    """Two of a transfer's pieces are given back: then it may hold its whole share again, and no more."""
    staging = Staging(8, 8)
    for index in range(4):
        land(staging, index)
    staging.free(0)
    staging.free(1)
    land(staging, 4)
    land(staging, 5)
    with pytest.raises(FrameError, match="occupies more than 4 of 8"):
        land(staging, 6)
