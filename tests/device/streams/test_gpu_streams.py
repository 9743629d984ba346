"""Streams of a GPU whose work runs in turn."""

from __future__ import annotations

import pytest
import torch

from baton.device.streams.cuda_stream import TorchEvent, TorchStream

pytestmark = pytest.mark.gpu


def busy_for_some_ms() -> None:
    """Occupies the current stream for some tens of milliseconds."""
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]


def cuda_stream(priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def test_neither_stream_begins_before_what_the_other_was_given_has_ended() -> None:
    device = torch.device("cuda")
    steps = cuda_stream(-1)
    between = TorchStream(device, steps)
    value = torch.ones(1, device=device)
    torch.cuda.synchronize()
    assert between.in_turn
    with torch.cuda.stream(steps):
        busy_for_some_ms()
        value.mul_(2)
    with between.activate():
        value.add_(3)
        busy_for_some_ms()
        value.add_(3)
    with torch.cuda.stream(steps):
        value.mul_(2)
    torch.cuda.synchronize()
    assert value.item() == (1 * 2 + 3 + 3) * 2


def test_a_stream_of_its_own_waits_for_none() -> None:
    device = torch.device("cuda")
    steps, own = cuda_stream(), TorchStream(device)
    assert not own.in_turn
    torch.cuda.synchronize()
    with torch.cuda.stream(steps):
        busy_for_some_ms()
        waiting = TorchEvent()
    with own.activate():
        torch.ones(1, device=device).add_(1)
        end = own.record_event()
    end.synchronize()
    assert not waiting.query()
    torch.cuda.synchronize()
