"""The server's own metrics while a run lasts, on the run's clock.

Sources are Prometheus endpoints, the user's and, behind Baton's gRPC door, every worker's; and that door's
status. What a source says is kept as it is, but for histograms' buckets. A source that does not answer is
left out of that round: a run is not lost for it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from baton.v1.router_pb2 import GetStatusRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from loadgen.targets.grpc_target import OPTIONS, address_of
from loadgen.targets.http_get import get
from loadgen.targets.target import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

EVERY_S = 1.0
_ANSWER_S = 0.8
_MOST_SOURCES = 256
_MOST_ROUNDS = 36_000
_KINDS = ("counter", "gauge", "histogram", "summary", "unknown")
_LEFT_OUT = ("_bucket", "_created")
_FOREIGN = ("python_", "process_", "go_")


@dataclass(frozen=True, slots=True)
class Sample:
    """One source at one time."""

    at: float
    source: str
    values: dict[str, float]

    def shifted(self, seconds: float) -> Sample:
        """The same on a clock that is so much ahead."""
        return Sample(self.at + seconds, self.source, self.values)


class Scraper:
    """Asks every source once a second while `run` runs; `samples` are what they said."""

    def __init__(self, urls: Sequence[str], target: str, clock: Callable[[], float]) -> None:
        self._urls = {url.split("://", 1)[1].partition("/")[0]: url for url in urls}
        self._target = target
        self._clock = clock
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Until cancelled."""
        channel = None
        if self._target.startswith("grpc://"):
            channel = grpc.aio.insecure_channel(address_of(self._target), options=OPTIONS)
        try:
            for _ in range(_MOST_ROUNDS):
                due = self._clock() + EVERY_S
                sources = dict(self._urls)
                if channel is not None:
                    sources |= await self._status(channel)
                answers = (self._scrape(name, url) for name, url in list(sources.items())[:_MOST_SOURCES])
                await asyncio.gather(*answers)
                await asyncio.sleep(max(0.0, due - self._clock()))
        finally:
            if channel is not None:
                await channel.close(None)

    async def _status(self, channel: grpc.aio.Channel) -> dict[str, str]:
        """Keeps what the door says of itself; returns where its workers' metrics are."""
        try:
            status = await RouterServiceStub(channel).GetStatus(GetStatusRequest(), timeout=_ANSWER_S)
        except grpc.aio.AioRpcError:
            return {}
        router = status.router
        values = {"running requests": float(router.running), "waiting requests": float(router.waiting)}
        self.samples.append(Sample(self._clock(), "router", values))
        return {
            one.worker.identity.name or one.metrics_address: f"http://{one.metrics_address}/metrics"
            for one in status.workers
            if one.metrics_address
        }

    async def _scrape(self, name: str, url: str) -> None:
        try:
            text = (await get(url, _ANSWER_S)).decode()
            values = read_metrics(text)
        except (Failure, ValueError):
            return
        self.samples.append(Sample(self._clock(), name, values))


def read_metrics(text: str) -> dict[str, float]:
    """Values by name and labels, buckets and the client library's own left out; ValueError where the text is
    no metrics."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (
                family.type not in _KINDS
                or sample.name.endswith(_LEFT_OUT)
                or sample.name.startswith(_FOREIGN)
            ):
                continue
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return values


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """A line a sample; no file where there is none."""
    if not samples:
        return
    with path.open("w") as lines:
        for sample in sorted(samples, key=lambda one: one.at):
            document: dict[str, Any] = {
                "at": round(sample.at, 3),
                "source": sample.source,
                "values": sample.values,
            }
            lines.write(json.dumps(document) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """Those of a run's folder; none where there is no file."""
    if not path.exists():
        return []
    with path.open() as lines:
        return [Sample(one["at"], one["source"], one["values"]) for one in map(json.loads, lines)]
