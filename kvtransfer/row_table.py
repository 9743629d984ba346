"""Rows for `move_rows`, one a staging index: filled on the host, moved by on the device, which adds the sums."""

from __future__ import annotations

import struct

from torch import Tensor

from baton.device.link_device import Line, LinkDevice
from kvtransfer.moving import ROW_WORDS

_ROW = struct.Struct("<5qQ")
ROW_BYTES = _ROW.size


class RowTable:
    """A row is filled again when what it said last time has been done."""

    def __init__(self, device: LinkDevice, rows: int) -> None:
        self._host = device.on_host(rows, ROW_WORDS)
        self.there: Tensor = device.table(rows, ROW_WORDS)
        self._bytes = self._host.numpy().data.cast("B")
        self._at_host, self._at_device = self._host.data_ptr(), self.there.data_ptr()

    def fill(self, row: int, nth: int, source: int, destination: int, words: int, begins: int) -> None:
        """Places in words; `nth` of those that are moved together; its sum begins with `begins`."""
        _ROW.pack_into(
            self._bytes, row * ROW_BYTES, source, destination, words, (nth + 1) * ROW_WORDS - 1, 0, begins
        )

    def up(self, line: Line, first: int, count: int) -> None:
        """To the device."""
        place = first * ROW_BYTES
        line.copy(self._at_device + place, self._at_host + place, count * ROW_BYTES)

    def down(self, line: Line, first: int, count: int, to: int) -> None:
        """From there to as many rows that begin at this address."""
        place = first * ROW_BYTES
        line.copy(to + place, self._at_device + place, count * ROW_BYTES)
