"""The order in which the host launches a step on several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton.device.streams.cuda_stream import StreamGroup
from baton.engine.parallel.exchange import Exchange
from baton.engine.parallel.exchange_layout import ExchangeShape
from baton.engine.parallel.rank_exchange import ExchangeGroup, ExchangeNodes
from tests.engine.parallel.host.devices import HostWorker


def launches(rank: int, pieces: int, log: list[tuple[int, int]]) -> Iterator[None]:
    for piece in range(pieces):
        log.append((rank, piece))
        yield


def test_no_device_is_a_sum_ahead() -> None:
    """One that has fewer pieces, as a graph is one, does not keep the others from theirs."""
    worker = HostWorker(3)
    shape = ExchangeShape(3, sums=2, rows=1, width=8, element_bytes=4, words=4)
    group = ExchangeGroup(Exchange(worker.devices, shape, torch.float32), torch.zeros(1, 8), 2.0)
    log: list[tuple[int, int]] = []
    group.launch_in_turns([launches(rank, pieces, log) for rank, pieces in enumerate((3, 1, 3))])
    assert log == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2), (2, 2)]


def test_a_step_has_all_sums_or_none() -> None:
    """A step without sums gathers logits alone. With another number devices would wait up to the deadline."""
    worker = HostWorker(2)
    shape = ExchangeShape(2, sums=2, rows=1, width=8, element_bytes=4, words=4)
    nodes = ExchangeNodes(Exchange(worker.devices, shape, torch.float32), 0, torch.zeros(1, 8))
    hidden = torch.zeros(1, 8)
    nodes.begin(None)
    nodes.end(hidden[:0], 0)
    nodes.begin(None)
    nodes.reduce(hidden, None, None)
    with pytest.raises(ValueError, match="1 sums of 2 in a step"):
        nodes.end(hidden, 0)
    with pytest.raises(ValueError, match=r"3 words of torch\.int32, not 4 of int32"):
        nodes.begin(torch.zeros(3, dtype=torch.int32))


class LoggedStream:
    """A `TorchStream` that says when it becomes the current one, and no more."""

    in_turn = True

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        self.log.append(f"{self.name} begins")
        yield
        self.log.append(f"{self.name} ends")

    def record_event(self) -> str:
        return self.name

    def copy_to_host(self, tensor: str) -> str:
        return f"{tensor} by {self.name}"


def test_streams_of_all_devices_are_current_and_the_first_device_is() -> None:
    log: list[str] = []
    first, *others = (LoggedStream(name, log) for name in ("first", "second", "third"))
    group: Any = StreamGroup(first, others)  # type: ignore[arg-type]
    with group.activate():
        assert log == ["second begins", "third begins", "first begins"]
        assert group.record_event() == "first"
        assert group.copy_to_host("tokens") == "tokens by first"
    assert log[3:] == ["first ends", "third ends", "second ends"]
    assert group.in_turn
    assert group.asynchronous
