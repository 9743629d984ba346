"""Checks of a call before any of its messages is read: the cluster's token, and with TLS a certificate that
is admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from baton.base.cluster_auth import UNAUTHENTICATED, RpcToken
from baton.rpc.checked_handler import Method, with_method
from kvtransfer.transports.grpc.tls import ListenerTls

if TYPE_CHECKING:  # generic in their stub file only
    _ServerInterceptor = grpc.ServerInterceptor[Any, Any]
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Continuation = Callable[[grpc.HandlerCallDetails], _Handler | None]
else:
    _ServerInterceptor = grpc.ServerInterceptor

Refuse = Callable[[grpc.ServicerContext, str], NoReturn]
"""Ends a call, for the reason given."""


class CallCheck(_ServerInterceptor):
    """Refuses calls without the cluster's token and, with TLS, of peers that are not admitted; a call costs
    one check, its messages cost nothing."""

    def __init__(self, token: RpcToken, tls: ListenerTls | None, refuse: Refuse) -> None:
        self._token = token
        self._tls = tls
        self._refuse = refuse
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse_call)

    def intercept_service(
        self,
        continuation: _Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        details: Any = handler_call_details
        if not self._token.admits(details.method, details.invocation_metadata):
            return self._refusal
        inner = continuation(handler_call_details)
        if inner is None or self._tls is None:
            return inner
        checked: _Handler = with_method(inner, partial(self._checked, self._tls))
        return checked

    def _refuse_call(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self._refuse(context, UNAUTHENTICATED)

    def _checked(self, tls: ListenerTls, method: Method) -> Method:
        def checked(request: object, context: grpc.ServicerContext) -> object:
            refusal = tls.refusal(context.auth_context())
            if refusal:
                self._refuse(context, refusal)
            return method(request, context)

        return checked
