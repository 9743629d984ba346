"""Metadata of an answer: headers over HTTP, trailing metadata over gRPC, under the same names.

x-request-id              the id of the call's first output, as in the router's log
traceresponse             the call's span, where traces are on (W3C Trace Context)
x-baton-ignored-fields    undocumented fields of the request, if it had any (`ignored_fields`)
server-timing             where the time went (`timings`); over HTTP only where the answer is not streamed
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.rpc.grpc_errors import REQUEST_ID, TRACERESPONSE
from baton.v1.router_pb2 import RequestTrace
from services.router.formats import ignored_fields, timings
from services.router.formats.json_bodies import Headers
from services.router.request.request import Request


def answer_metadata(request: Request, traces: Iterable[RequestTrace] = ()) -> list[tuple[str, str]]:
    """Names and values. `traces`: those of the call's outputs that have ended."""
    metadata = [(REQUEST_ID, request.id.hex())]
    if (trace := request.call.trace) is not None:
        metadata.append((TRACERESPONSE, trace.context.header))
    if ignored := request.call.ignored_fields:
        metadata.append((ignored_fields.HEADER, ignored_fields.shown(ignored)))
    if timing := timings.server_timing(traces):
        metadata.append((timings.HEADER, timing))
    return metadata


def answer_headers(request: Request, traces: Iterable[RequestTrace] = ()) -> Headers:
    """`answer_metadata` as headers of a raw HTTP response."""
    return [(name.encode(), value.encode()) for name, value in answer_metadata(request, traces)]
