"""Pieces of a link whose blocks its device reads: how many it has read, in the order of their puts."""

from __future__ import annotations

from collections import deque

from baton.device.link_device import Moment


class BlockReads:
    """Owned by the loop. `put`, and when the device was told of the piece `read_by`."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()
        self._put = self._read = 0

    def put(self) -> None:
        """One piece more. Should the device refuse it, it counts as read when all are."""
        self._put += 1

    def read_by(self, moment: Moment) -> None:
        """The piece that was put last has been read then."""
        self._moments.append(moment)

    @property
    def under_way(self) -> bool:
        return bool(self._moments)

    def count(self) -> int:
        """Of the pieces that have been read since the beginning."""
        while self._moments and self._moments[0].ended():
            self._moments.popleft()
            self._read += 1
        return self._read

    def end(self) -> None:
        """The device reads none any more."""
        self._read = self._put
        self._moments.clear()
