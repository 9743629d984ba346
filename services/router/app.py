"""Assembles the router from its parts, in the order of their dependencies; starts and stops it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute

from baton.base.cluster_auth import secret_name
from services.common.config.router import RouterConfig, check_public_access
from services.common.observability.audit_log import open_audit_log
from services.common.observability.logs import get_log
from services.common.processes.child_protocol import report
from services.router.admin_ports import AdminPorts
from services.router.api.admin_api import AdminService
from services.router.api.grpc_api import GrpcApi
from services.router.api.http_api import HttpApi, health_routes
from services.router.auth.configured import configured_keys
from services.router.auth.http_auth import require_keys
from services.router.auth.redis_keys import RedisKeys
from services.router.auth.scopes import ADMIN_HTTP_RULES
from services.router.auth.tenant_keys import TenantKeys
from services.router.formats.ignored_fields import IgnoredFields
from services.router.http.errors import HANDLERS
from services.router.http.server import http_app
from services.router.lifecycle.admission import Admission, ServedModel
from services.router.lifecycle.cancels import Cancels
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.lifecycle.observations import Observations
from services.router.lifecycle.outbox import UnreadBudget
from services.router.lifecycle.readiness import Readiness
from services.router.lifecycle.request_lifecycle import LifecycleDeps
from services.router.observability.metrics import metrics_route, register_metrics
from services.router.observability.process_series import series
from services.router.observability.sliding_window import SlidingWindow
from services.router.observability.status import Status
from services.router.observability.store import Store
from services.router.placement.placement import Placement
from services.router.placement.pools import Pools
from services.router.placement.prefix_affinity import PrefixAffinity
from services.router.plaintext import check_plaintext
from services.router.processes.operator_state import OperatorState
from services.router.processes.sibling_questions import SiblingQuestions
from services.router.processes.sibling_view import OwnLoad, SiblingView
from services.router.public_ports import PublicPorts
from services.router.queue.counted_queue import CountedQueue
from services.router.queue.demand import Demand
from services.router.request.sizes import max_body_bytes as default_max_body_bytes
from services.router.tenants.leases import QuotaLeases
from services.router.text.model_info import ModelInfo
from services.router.text.tokenizer import ModelTokenizer
from services.router.tokenization.helper_processes import HelperProcesses, helper_settings
from services.router.tokenization.request_reader import RequestReader
from services.router.tokenization.tokenizer_pool import TokenizerPool
from services.router.tools.conversation_format import ConversationFormat
from services.router.ui.routes import ui_routes
from services.router.workers.certificates import configured_certificates
from services.router.workers.directory import Directory
from services.router.workers.discovery import Discovery

_STOP_GRACE_S = 1.0
# How long a stopping router still takes requests over connections that clients have kept.
_LAST_REQUESTS_S, _LAST_REQUESTS_SHARE = 1.0, 0.25
_DRAIN_POLL_S = 0.02

_log = get_log("router")


class Router:
    """A router, constructed on a running event loop; then `start`, wait until ready, and `stop`."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the model folder. BatonError(INVALID) if a file of it or the Redis URL is unusable."""
        self._config = config
        check_plaintext(config)
        check_public_access(config.host, config.auth)
        self.audit = open_audit_log(config.audit_log, None if config.member is None else config.member.index)
        self.keys = configured_keys(config, self.audit)
        self._leases: QuotaLeases | None = None
        info = ModelInfo.load(Path(config.model), byte_tokenizer=config.byte_tokenizer)
        self._max_body_bytes = config.max_body_bytes or default_max_body_bytes(info.limits.max_positions)
        self._assemble_workers(info)
        self._assemble_requests(info)
        self._background: list[asyncio.Task[None]] = []
        self._addresses: dict[str, str] = {}
        self._window = SlidingWindow(self.observations)
        registry = CollectorRegistry()
        self._assemble_siblings(registry)
        self._assemble_public(registry)
        self._assemble_admin(registry)
        register_metrics(self._status, registry, aliases=config.metric_aliases)

    def _assemble_workers(self, info: ModelInfo) -> None:
        """Assembles the known workers, and the queue for them."""
        config = self._config
        self.store = Store(config.state, config.stored_responses, self._max_body_bytes)
        self.cancels = Cancels()
        certificates = configured_certificates(config)
        directory = Directory(
            config.workers,
            self._workers_changed,
            self.cancels.cancel_orphan,
            config.cluster_secret,
            certificates,
        )
        self.directory = directory
        self.discovery = Discovery(
            directory,
            config.served_model_name,
            config.workers,
            secret_name(config.cluster_secret),
            certificates,
        )
        name, digest = config.served_model_name, info.tokenizer.digest
        self.pools = Pools(name, digest, config.pool, lambda: directory.workers, config.queue_timeout_s)
        self.placement = Placement(
            directory, self.pools, config.prefill_ahead_tokens, refuse_late=config.refuse_late
        )
        self.queue = CountedQueue(
            self.placement, config.max_waiting, config.queue_timeout_s, config.waiting_share,
            Demand(config.expected_prefill_tokens_per_s),
        )  # fmt: skip
        self.prefixes = PrefixAffinity(config.prefix_secret, lambda: directory.workers, self.store.state)

    def _assemble_requests(self, info: ModelInfo) -> None:
        """Admission and lifecycle of requests."""
        config = self._config
        job_bytes = self._max_body_bytes + self.store.most_response_bytes  # a body, and what it continues
        self.tokenizer = TokenizerPool(
            ModelTokenizer(Path(config.model), info, bytes_only=config.byte_tokenizer),
            HelperProcesses(helper_settings(config.model, config.byte_tokenizer, job_bytes)),
            config.tokenizer_threads,
            config.max_waiting,
        )
        self.observations = Observations.of(config, self.audit)
        self.unread = UnreadBudget(config.connections.max_unread_mb << 20)
        self.dispatcher = Dispatcher(
            LifecycleDeps(
                queue=self.queue,
                cancels=self.cancels,
                max_attempts=config.max_attempts,
                observations=self.observations,
                prefixes=self.prefixes,
                unread=self.unread,
                output_text=self.tokenizer.output_text,
                journal=self.store.journal,
            )
        )
        model = ServedModel(config.served_model_name, info, self.pools)
        self.admission = Admission(
            model,
            RequestReader(
                self.tokenizer,
                model.limits,
                self._max_body_bytes,
                IgnoredFields(strict=config.strict_fields),
            ),
            self.tokenizer,
            self.observations,
            config.request_timeout_s,
            config.max_answer_values,
            ConversationFormat.of(
                info.tokenizer.tool_template,
                self.tokenizer.tokenizer.special_tokens,
                config.tool_calls,
                config.reasoning,
            ),
            self.store.responses,
        )
        self.readiness = Readiness(
            self.placement,
            self.dispatcher,
            lambda: self._leases is None or self._leases.joined,
            config.queue_timeout_s,
        )

    def _assemble_siblings(self, registry: CollectorRegistry) -> None:
        """Reports to the router's other processes, where there are any."""
        member = self._config.member
        if isinstance(self.keys, TenantKeys | RedisKeys) and (self.store.quotas or member):
            count = 1 if member is None else member.count
            keys = self.keys
            self._leases = QuotaLeases(self.store.quotas, lambda: keys.accounts, time.monotonic, count)
        self._view = None
        if member is not None:
            queue = self.queue
            self._view = SiblingView(
                member,
                lambda: self.directory.workers,
                self.prefixes,
                self.placement.division,
                lambda: OwnLoad.of(self.dispatcher.running, queue),
            )
            self.placement.on_claim = queue.on_wait = self._view.changed
            queue.siblings = self._view
        self.operator_state = OperatorState(self.directory, self.dispatcher, self.pools)
        self._questions = SiblingQuestions(
            member,
            {
                "metrics": lambda question: series(registry),
                "status": lambda window_s: self._status.of_process(window_s),
            },
        )

    def _assemble_public(self, registry: CollectorRegistry) -> None:
        """Assembles the listeners of the public ports."""
        config = self._config
        more_routes = [metrics_route(registry, self._questions)] if config.serves_public_metrics else []
        self.http_api = HttpApi(
            self.admission, self.dispatcher, self.readiness, more_routes, self.store.responses, self.audit
        )
        arrived = self.observations.traces.arrived
        self.public = PublicPorts(config, self.http_api.app, self.keys, arrived, self._max_body_bytes)
        self.connections = self.public.connections
        self._status = Status(
            model=self.admission.model,
            observations=self.observations,
            window=self._window,
            readiness=self.readiness,
            dispatcher=self.dispatcher,
            unread=self.unread,
            queue=self.queue,
            cancels=self.cancels,
            directory=self.directory,
            pools=self.pools,
            store=self.store,
            connections=self.connections,
            started=time.monotonic(),
            addresses=self._addresses,
            siblings=self._questions,
            keys=self.keys,
            audit_log=self.audit if config.audit_log else None,
        )
        grpc_api = GrpcApi(self.admission, self.dispatcher, self._status, config.connections.read_grace_s)
        grpc_api.register(self.public.grpc.server)

    def _assemble_admin(self, registry: CollectorRegistry) -> None:
        """Assembles the listeners of the admin ports."""
        config = self._config
        service = AdminService(
            self._status,
            self.directory,
            self.dispatcher,
            self.pools,
            self._state_changed,
            lambda: self._view.running if self._view is not None else 0,
            self.audit,
        )
        routes: list[BaseRoute] = [metrics_route(registry, self._questions), *health_routes(self.readiness)]
        if config.serves_ui:
            routes += ui_routes(self._status, self.admission, self.dispatcher)
        app = http_app(routes, HANDLERS)
        if self.keys:
            require_keys(app, self.keys, ADMIN_HTTP_RULES)
        arrived = self.observations.traces.arrived
        self.admin = AdminPorts(config, service, app, arrived, self._addresses)

    async def start(self) -> dict[str, str]:
        """Opens the public and the admin ports and begins to look for workers.

        Returns host:port of `grpc`, `http`, `admin` (gRPC) and `admin_http`. BatonError(INVALID) if a port is
        in use.
        """
        config, member = self._config, self._config.member
        self._addresses["http"] = self.public.bind_http()
        if serves_admin := member is None or member.serves_admin:
            self.admin.bind_http()
        self._addresses["grpc"] = await self.public.start_grpc()
        if serves_admin:
            await self.serve_admin()
        await self.public.http.start()
        await self._questions.start()
        if self._view is not None:
            self._view.start()
        self.directory.start()
        self.store.watch(lambda members: self.discovery.set_registered(members.values()))
        if isinstance(self.keys, RedisKeys):
            watch = self.store.watch_api_keys
            self.keys.follow(watch(config.cluster_secret, self.keys.changed))
        self._background = [
            asyncio.create_task(self._report_health()),
            asyncio.create_task(self._window.run()),
        ]
        if self._leases is not None:
            self._background.append(asyncio.create_task(self._leases.run(self.readiness.update)))
        return dict(self._addresses)

    async def serve_admin(self) -> None:
        """Opens the admin ports: at the start, or where the process that served them has ended."""
        if not self.admin.started:
            await self.admin.start()
        if self._config.member is not None:
            self.operator_state.relay_by(_relay)

    async def stop(self, drain_s: float) -> None:
        """Drains: moves clients elsewhere, then refuses new requests; gives running ones `drain_s` to end and
        cancels the rest."""
        deadline = time.monotonic() + drain_s
        self.dispatcher.leaving = True
        self.readiness.update()
        # Sends GOAWAY on each connection, so that clients open another one, and waits for the calls that run.
        calls = asyncio.create_task(self.public.grpc.stop(drain_s))
        await self.public.http.release_connections(min(_LAST_REQUESTS_S, _LAST_REQUESTS_SHARE * drain_s))
        await self._drained(calls, deadline)
        await self.dispatcher.drain(max(0.0, deadline - time.monotonic()))
        calls.cancel()
        for task in self._background:
            task.cancel()
        await self.prefixes.close()
        if self._leases is not None:
            await self._leases.close()
        if self._view is not None:
            await self._view.stop()
        await asyncio.gather(
            self._questions.stop(),
            self.public.http.stop(),
            self.public.grpc.stop(_STOP_GRACE_S),
            self.admin.http.stop(),
            self.admin.grpc.stop(_STOP_GRACE_S),
            self.store.close(),
        )
        await self.directory.stop()
        self.tokenizer.close()
        await asyncio.to_thread(self.observations.close)

    async def _drained(self, calls: asyncio.Task[None], deadline: float) -> None:
        """Returns once no request runs, and none that has arrived is still being read; `calls` ends with the
        last over gRPC. What is not read in time is refused, and a client that does not read is not waited
        for."""
        busy = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if self.dispatcher.running:
                busy = now
            elif now - busy > _STOP_GRACE_S or (calls.done() and not self.connections.running):
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    def _workers_changed(self) -> None:
        """A worker came, went, or has more or less room. The last is so several times a request."""
        if self.pools.review():
            self._state_changed()
        else:
            self._room_changed()

    def _state_changed(self) -> None:
        """Workers, the current pool, or draining have changed."""
        self.operator_state.review()
        self.prefixes.forget_lost()
        self._room_changed()
        self.readiness.update()

    def _room_changed(self) -> None:
        if self._view is not None:
            self._view.changed()
        self.queue.place_waiting()

    async def _report_health(self) -> None:
        """Sets the status of grpc.health.v1 to the router's readiness."""
        while True:
            for ready in (True, False):
                await self.readiness.wait(ready=ready)
                await self.public.grpc.set_serving(ready)
                _log.info("ready" if ready else "not_ready")


def _relay(message: Mapping[str, Any]) -> None:
    """Has the parent send a message to the router's other processes."""
    report({"relay": message})
