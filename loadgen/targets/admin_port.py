"""The target's AdminService: the state of its workers, and where their metrics are."""

from __future__ import annotations

import os
from typing import Self

import grpc
import grpc.aio

from baton.base.admin_address import DEFAULT_ADDRESS, belongs_to
from baton.base.cluster_auth import admin_metadata
from baton.v1.admin_pb2 import AdminServiceGetStatusRequest, AdminServiceGetStatusResponse
from baton.v1.admin_pb2_grpc import AdminServiceStub
from loadgen.common.settings import TargetSettings
from loadgen.targets.grpc_target import OPTIONS


class NoAdminError(Exception):
    """The target's AdminService is not available; the message has the reason."""


class AdminPort:
    """AdminService at the `--admin` address, or on loopback's default port if it belongs to the target's
    router."""

    def __init__(self, target: TargetSettings) -> None:
        self._given = bool(target.admin)
        self._address = target.admin.removeprefix("grpc://") or DEFAULT_ADDRESS
        self._target = target.url.partition("://")[2].partition("/")[0]
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._channel is not None
        await self._channel.close(None)

    async def status(self, timeout_s: float, *, check_integrity: bool) -> AdminServiceGetStatusResponse:
        """The full status. Raises NoAdminError where it does not answer in time or belongs to another
        router."""
        assert self._channel is not None
        request = AdminServiceGetStatusRequest(check_integrity=check_integrity)
        try:
            status = await AdminServiceStub(self._channel).GetStatus(
                request, timeout=timeout_s, metadata=admin_metadata(os.environ)
            )
        except grpc.aio.AioRpcError as error:
            raise NoAdminError(f"no AdminService at {self._address}: {error.code().name}") from None
        if not self._given and not belongs_to(status, self._target):
            raise NoAdminError(f"the AdminService at {self._address} is not that of {self._target}")
        return status
