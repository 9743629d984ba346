"""Runs the router as several processes: starts them, replaces those that end or hang, stops all together.

It speaks the protocol of a child process to its own parent, as a single router does, and to its children.
Messages of the parent go to all of them; what operators changed at the process that serves the admin ports
(`operator_state`) goes to the others, and to those that are started later. That is process 0, until it ends:
then another one serves them.

A process that is killed takes its connections along: their clients get a connection error and may retry.
All stop together, since the kernel resets what waits in the backlog of a listener that closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from baton.base.errors import BatonError, ErrorKind
from baton.base.python_module import python_module
from services.common.config.router import GroupMember, RouterConfig
from services.common.observability.logs import configure_logs, get_log
from services.common.processes.child_process import Child, ChildError
from services.common.processes.child_protocol import StopSignal, messages_from_parent, report_ready
from services.common.processes.child_watch import ChildWatch
from services.common.processes.owned_folder import owned_folder
from services.router.processes.member_health import MemberHealth
from services.router.processes.ports import reserved_ports

_COMMAND = python_module("services.router")
# Pause before the second restart in a row of a process; it doubles before each further one, to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
# A process that lived this long resets its count of restarts in a row; after too many, all end.
_LASTING_S, _MOST_RESTARTS = 60.0, 8
# Beyond `drain_s`, for the end of a process that has drained.
_END_S = 5.0
# How often it is looked whether a process was not replaced in time.
_REVIEW_S = 1.0
_NONE = -1

_log = get_log("router")


class RouterGroup:
    """The processes of a router. `serve` returns only by an error; `stop` has to be awaited in the end."""

    def __init__(self, config: RouterConfig, folder: str) -> None:
        """`config`: with the ports to bind. `folder`: for the processes' sockets."""
        self._configs = [_member(config, index, folder) for index in range(config.processes)]
        self._health = MemberHealth(self._broadcast)
        # The process that serves the admin ports, and those that answer.
        self._admin = 0
        self._answering: set[int] = set()
        self._drain_s = config.drain_s
        self._children: dict[int, Child] = {}
        self._ready: dict[int, dict[str, str]] = {}
        self._stopping = False
        # The latest value of each message, for processes that are started later.
        self._messages: dict[str, Any] = {}

    async def serve(self) -> None:
        """Runs the processes. BatonError where one refuses its configuration, ends before it was ready, or
        has ended too often."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_parent())
            tasks.create_task(self._review())
            for index in range(len(self._configs)):
                tasks.create_task(self._keep(index))

    async def stop(self) -> None:
        """Drains and ends all processes, together."""
        self._stopping = True
        deadline = asyncio.get_running_loop().time() + self._drain_s + _END_S
        await asyncio.gather(*(child.stop(deadline) for child in self._children.values()))

    async def _follow_parent(self) -> None:
        async for message in messages_from_parent():
            self._broadcast(message)

    async def _review(self) -> None:
        while True:
            await asyncio.sleep(_REVIEW_S)
            self._health.review()

    def _broadcast(self, message: Mapping[str, Any], but: int | None = None) -> None:
        self._messages |= message
        for index, child in self._children.items():
            if index != but:
                child.send(message)

    def _relay(self, index: int, message: Mapping[str, Any]) -> None:
        """A process has something for the others."""
        if isinstance(relayed := message.get("relay"), dict):
            self._broadcast(relayed, but=index)

    async def _keep(self, index: int) -> None:
        """Starts a process, and starts it again whenever it ends."""
        loop = asyncio.get_running_loop()
        in_a_row = 0
        while True:
            began = loop.time()
            failure = await self._run(index)
            if self._stopping:
                return
            in_a_row = 1 if loop.time() - began > _LASTING_S else in_a_row + 1
            if index not in self._ready or in_a_row > _MOST_RESTARTS:
                raise failure
            _log.warning("router_process_replaced", process_index=index, reason=failure.message)
            await asyncio.sleep(
                min(_FIRST_PAUSE_S * 2.0 ** (in_a_row - 2), _LONGEST_PAUSE_S) * (in_a_row > 1)
            )

    async def _run(self, index: int) -> BatonError:
        """Runs one process from its start to its end; why it has ended."""
        config = self._configs[index]
        assert config.member is not None
        member = config.member.model_copy(update={"serves_admin": index == self._admin})
        child = await Child.start(
            f"router process {index}",
            _COMMAND,
            config.model_copy(update={"member": member}).model_dump_json(),
            keep_stdin=True,
            error_prefix="",
            on_message=partial(self._relay, index),
        )
        self._children[index] = child
        if self._messages:
            child.send(self._messages)
        if self._stopping:  # `stop` has seen only the process before
            child.kill()
        watch = ChildWatch(child, partial(self._hung, index), partial(self._heard, index))
        watching = asyncio.create_task(watch.run())
        try:
            # No time limit: it is ready once it has found workers, which may be missing for long.
            addresses = await child.ready(math.inf)
            self._is_ready(index, addresses)
            await child.ended()
            failure: BatonError | ChildError = await child.death()
        except (BatonError, ChildError) as error:
            failure = error
            child.kill()
            await child.ended()
        finally:
            watching.cancel()
        self._lost(index)
        return failure if isinstance(failure, BatonError) else BatonError(ErrorKind.UNAVAILABLE, str(failure))

    def _heard(self, index: int, silent: bool) -> None:
        """A process has become silent, or answers."""
        self._health.changed(index, silent)
        (self._answering.discard if silent else self._answering.add)(index)
        self._appoint()

    def _hung(self, index: int, silent_s: float) -> None:
        _log.error("router_process_hung", process_index=index, silent_s=silent_s)

    def _lost(self, index: int) -> None:
        """Takes note that a process has ended."""
        self._answering.discard(index)
        if index == self._admin:
            self._admin = _NONE
        if not self._stopping:
            self._health.ended(index)
            self._appoint()

    def _appoint(self) -> None:
        """Has a process serve the admin ports, if the one that did has ended."""
        if self._admin == _NONE and self._answering:
            self._admin = min(self._answering)
            self._children[self._admin].send({"serve_admin": True})
            _log.info("admin_ports_moved", process_index=self._admin)

    def _is_ready(self, index: int, addresses: dict[str, str]) -> None:
        waited = len(self._ready) < len(self._configs)
        self._ready[index] = addresses
        if waited and len(self._ready) == len(self._configs):
            report_ready(self._ready[0])


def _member(config: RouterConfig, index: int, folder: str) -> RouterConfig:
    """The configuration of one process: with its share of what bounds the router as a whole."""
    count = config.processes

    def share(value: int, least: int = 1) -> int:
        return max(least, math.ceil(value / count))

    limits = config.connections
    per_address = limits.max_connections_per_address
    return config.model_copy(
        update={
            "member": GroupMember(index=index, count=count, folder=folder),
            "max_waiting": share(config.max_waiting),
            "connections": limits.model_copy(
                update={
                    "max_connections": share(limits.max_connections, 8),
                    "max_connections_per_address": None if per_address is None else share(per_address),
                    "max_grpc_connections": share(limits.grpc_connections, 8),
                    "max_unread_mb": share(limits.max_unread_mb),
                    "max_buffered_body_mb": share(limits.max_buffered_body_mb),
                }
            ),
        }
    )


async def run_group(config: RouterConfig, stop: StopSignal) -> None:
    """Serves with `config.processes` processes until `stop` is set, then drains them."""
    configure_logs(config.log_level, process="router")
    with reserved_ports(config) as bound, owned_folder("baton-router-") as folder:
        group = RouterGroup(bound, folder)
        serving = asyncio.create_task(group.serve())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
        except* BatonError as errors:
            raise _first(errors) from None
        finally:
            await group.stop()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await serving


def _first(errors: BaseExceptionGroup[BatonError]) -> BatonError:
    first = errors.exceptions[0]
    return first if isinstance(first, BatonError) else _first(first)
