"""TLS of links over gRPC, as the process that opens them provides it, and the check of peers at listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc

if TYPE_CHECKING:  # generic in its stub file only
    _ServerInterceptor = grpc.ServerInterceptor[Any, Any]
else:
    _ServerInterceptor = grpc.ServerInterceptor


class ListenerTls(Protocol):
    """TLS of a listener; `baton.tls.server.ServerTls` is one."""

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`."""

    def refusal(self, auth_context: Mapping[str, bytes] | Mapping[str, Iterable[bytes]]) -> str:
        """Why a peer with this `ServicerContext.auth_context()` is not admitted, or ""."""


class LinkTls(Protocol):
    """TLS of both ends of links."""

    def server(self) -> ListenerTls:
        """TLS of a listener that admits senders."""

    def arguments(self, certificates: Sequence[str]) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Credentials and further options of a channel to a listener that presents one of these certificates,
        in PEM. Raises BatonError where none of them is trusted."""


class PeerCheck(_ServerInterceptor):
    """Ends the calls of peers that are not admitted; a call costs one check, its messages cost nothing."""

    def __init__(self, tls: ListenerTls, refuse: Callable[[grpc.ServicerContext, str], NoReturn]) -> None:
        """`refuse` ends a call with the reason given."""
        self._tls = tls
        self._refuse = refuse

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        inner: Any = continuation(handler_call_details)
        if inner is None:
            return None
        names = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        (name,) = (name for name in names if getattr(inner, name) is not None)
        checked: grpc.RpcMethodHandler[Any, Any] = inner._replace(
            **{name: self._checked(getattr(inner, name))}
        )
        return checked

    def _checked(self, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def checked(request: object, context: grpc.ServicerContext) -> object:
            refusal = self._tls.refusal(context.auth_context())
            if refusal:
                self._refuse(context, refusal)
            return method(request, context)

        return checked
