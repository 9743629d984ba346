"""Samples the server's own metrics during a run, on the run's clock.

Sources are Prometheus endpoints, those that the user gives and, where the target's AdminService answers,
every worker's; and the router's status. Samples are stored without histogram buckets. A source that does not
answer is skipped for that sample.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import grpc
import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from baton.v1.router_pb2 import GetStatusRequest, RouterStatus
from baton.v1.router_pb2_grpc import RouterServiceStub
from loadgen.common.server_samples import Sample
from loadgen.common.settings import TargetSettings
from loadgen.targets.admin_port import AdminPort, NoAdminError
from loadgen.targets.grpc_target import OPTIONS
from loadgen.targets.http_connection import get
from loadgen.targets.target import Failure, credentials_of
from loadgen.targets.tls import grpc_channel, is_grpc

EVERY_S = 1.0
_ANSWER_S = 0.8
_MOST_SOURCES = 256
_MOST_ROUNDS = 36_000
_KINDS = ("counter", "gauge", "histogram", "summary", "unknown")
_LEFT_OUT = ("_bucket", "_created")
_FOREIGN = ("python_", "process_", "go_")


class Scraper:
    """Samples every source once per second while `run` runs, into `samples`."""

    def __init__(self, urls: Sequence[str], target: TargetSettings, clock: Callable[[], float]) -> None:
        self._urls = {url.split("://", 1)[1].partition("/")[0]: url for url in urls}
        self._target = target
        self._clock = clock
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Scrapes metrics in rounds until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            admin = await stack.enter_async_context(AdminPort(self._target))
            public = None
            if is_grpc(self._target.url):
                channel = grpc_channel(self._target, OPTIONS)
                public = await stack.enter_async_context(channel)
            for _ in range(_MOST_ROUNDS):
                due = self._clock() + EVERY_S
                sources = self._urls | await self._status(admin, public)
                answers = (self._scrape(name, url) for name, url in list(sources.items())[:_MOST_SOURCES])
                await asyncio.gather(*answers)
                await asyncio.sleep(max(0.0, due - self._clock()))

    async def _status(self, admin: AdminPort, public: grpc.aio.Channel | None) -> dict[str, str]:
        """Stores the router's totals; returns the metrics addresses of its workers, if known."""
        try:
            status = await admin.status(_ANSWER_S, check_integrity=False)
        except NoAdminError:
            if public is not None:
                await self._totals(public)
            return {}
        self._keep(status.router)
        return {
            one.worker.identity.name or one.metrics_address: f"http://{one.metrics_address}/metrics"
            for one in status.workers
            if one.metrics_address
        }

    async def _totals(self, channel: grpc.aio.Channel) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await RouterServiceStub(channel).GetStatus(
                GetStatusRequest(), timeout=_ANSWER_S, metadata=credentials_of(self._target)
            )
            self._keep(answer.router)

    def _keep(self, router: RouterStatus) -> None:
        values = {"running requests": float(router.running), "waiting requests": float(router.waiting)}
        self.samples.append(Sample(self._clock(), "router", values))

    async def _scrape(self, name: str, url: str) -> None:
        try:
            text = (await get(url, _ANSWER_S)).decode()
            values = read_metrics(text)
        except (Failure, ValueError):
            return
        self.samples.append(Sample(self._clock(), name, values))


def read_metrics(text: str) -> dict[str, float]:
    """Values by name and labels, without buckets and the client library's own metrics. Raises ValueError for
    text in another format.
    """
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
