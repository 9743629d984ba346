"""Source of `baton status`: AdminService, or the totals of the public service."""

from __future__ import annotations

import contextlib
import os
from typing import Self

import grpc.aio

from baton.base.addresses import is_loopback
from baton.base.admin_address import DEFAULT_ADDRESS, belongs_to
from baton.base.cluster_auth import admin_metadata
from baton.base.errors import BatonError
from baton.client.channel import metadata_of
from baton.v1 import admin_pb2, admin_pb2_grpc, router_pb2, router_pb2_grpc
from services.cli.common.admin_call import bare_address, call_error

# The API key of the public port, where that needs one.
API_KEY_VARIABLE = "BATON_API_KEY"
# Exit code of a status that says so.
CANNOT_SERVE = 1
# Deadline of the check whether the default admin port belongs to the given router.
_PROBE_S = 1.0


class StatusSource:
    """The status of one router.

    With an admin address, AdminService there is called; without any address, the one on loopback's default
    port. With a public address alone, the one on loopback's default port is called if it belongs to the same
    router, else the public service, which reports totals without workers.
    """

    def __init__(self, public: str | None, admin: str | None) -> None:
        self._public = bare_address(public)
        self._named = bare_address(admin)
        self._admin = self._named or (None if self._public else DEFAULT_ADDRESS)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._probed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def get(
        self, request: admin_pb2.AdminServiceGetStatusRequest, timeout_s: float
    ) -> admin_pb2.AdminServiceGetStatusResponse:
        """The status; without workers, store and addresses where only the public service is reachable.

        Raises BatonError(UNAVAILABLE) where the router does not answer.
        """
        if self._public and not self._admin and not self._probed:
            self._probed = True
            await self._probe(self._public)
        if self._admin:
            return await self._full(self._admin, request, timeout_s)
        assert self._public is not None
        return await self._totals(self._public, request.window_s, timeout_s)

    async def _probe(self, public: str) -> None:
        if not is_loopback(public.rpartition(":")[0]):
            return
        with contextlib.suppress(BatonError):
            request = admin_pb2.AdminServiceGetStatusRequest()
            if belongs_to(await self._full(DEFAULT_ADDRESS, request, _PROBE_S), public):
                self._admin = DEFAULT_ADDRESS

    async def _full(
        self, address: str, request: admin_pb2.AdminServiceGetStatusRequest, timeout_s: float
    ) -> admin_pb2.AdminServiceGetStatusResponse:
        stub = admin_pb2_grpc.AdminServiceStub(self._channel(address))
        try:
            return await stub.GetStatus(request, timeout=timeout_s, metadata=admin_metadata(os.environ))
        except grpc.aio.AioRpcError as error:
            raise call_error(address, error, default=self._named is None) from None

    async def _totals(
        self, address: str, window_s: int, timeout_s: float
    ) -> admin_pb2.AdminServiceGetStatusResponse:
        stub = router_pb2_grpc.RouterServiceStub(self._channel(address))
        try:
            answer = await stub.GetStatus(
                router_pb2.GetStatusRequest(window_s=window_s),
                timeout=timeout_s,
                metadata=metadata_of(os.environ.get(API_KEY_VARIABLE)),
            )
        except grpc.aio.AioRpcError as error:
            raise call_error(address, error, default=False, variable=API_KEY_VARIABLE) from None
        return admin_pb2.AdminServiceGetStatusResponse(router=answer.router)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address)
        return self._channels[address]


def is_partial(answer: admin_pb2.AdminServiceGetStatusResponse) -> bool:
    """True if the response is from the public service, which reports no workers."""
    return not answer.grpc_address
