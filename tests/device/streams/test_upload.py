"""An upload waits for its copy, whichever device that goes to."""

from __future__ import annotations

import pytest
import torch

from baton.device.streams import upload
from baton.device.streams.stream import HostStream, TimedEvent
from baton.device.streams.upload import UploadBuffer


def test_a_copy_is_awaited_on_a_stream_of_the_device_that_it_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream for each device."""
    awaited: list[torch.device] = []

    class Stream(HostStream):
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def record_event(self) -> TimedEvent:
            awaited.append(self._device)
            return super().record_event()

    made: list[torch.device] = []

    def stream_of(device: torch.device) -> Stream:
        made.append(device)
        return Stream(device)

    monkeypatch.setattr(upload, "compute_stream", stream_of)
    here, other = torch.device("cpu"), torch.device("meta")
    buffer = UploadBuffer(32, here)
    buffer.bytes[:] = bytes(range(32))
    for device in (here, other, here, other):
        target = torch.zeros(4, dtype=torch.int64, device=device)
        buffer.copy(buffer.view(torch.int64, 4), target)
        if device == here:
            assert target.view(torch.uint8).tolist() == list(range(32))
    assert made == [here, other]
    assert awaited == [here, other, here, other]
