"""Every kind of error in both APIs, and back from gRPC."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.rpc.grpc_errors import CODES, DETAILS_KEY, from_status, to_status
from services.common.errors import from_grpc, http_status, openai_body


def rpc_error(
    code: grpc.StatusCode, details: str, *metadata: tuple[str, str | bytes]
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details, "")


def failed_call(error: BatonError) -> grpc.aio.AioRpcError:
    """The error as a peer's call fails with it."""
    status = to_status(error)
    return rpc_error(status.code, status.details, *status.trailing_metadata)


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("tokens_sent", [True, False])
def test_the_exact_kind_is_restored(kind: ErrorKind, tokens_sent: bool) -> None:
    error = BatonError(kind, "why", tokens_sent=tokens_sent)
    back = from_grpc(failed_call(error), "decode-0")
    assert (back.kind, back.message) == (kind, "decode-0: why")
    status = to_status(error)
    whole = from_status(status.code, status.details, status.trailing_metadata)
    assert (whole.kind, whole.message, whole.tokens_sent) == (kind, "why", tokens_sent)
    assert type(whole) is BatonError


def test_a_field_is_restored() -> None:
    status = to_status(FieldError("no", param="top_p", code="odd"))
    error = from_status(status.code, status.details, status.trailing_metadata)
    assert isinstance(error, FieldError)
    assert (error.kind, error.param, error.code) == (ErrorKind.INVALID, "top_p", "odd")
    assert type(from_grpc(failed_call(FieldError("no", param="top_p")), "x")) is BatonError


@pytest.mark.parametrize("kind", ErrorKind)
def test_details_are_what_gRPC_libraries_expect(kind: ErrorKind) -> None:  # noqa: N802
    ((key, value),) = to_status(FieldError("no", param="top_p", kind=kind)).trailing_metadata
    assert key == DETAILS_KEY
    status = status_pb2.Status.FromString(value)
    assert (status.code, status.message) == (CODES[kind].value[0], "no")
    names = {detail.TypeName().removeprefix("google.rpc.") for detail in status.details}
    assert names == {"BadRequest", "ErrorInfo"} | ({"RetryInfo"} if kind.retryable else set())
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert (info.reason, info.domain) == (kind.name, "baton")


@pytest.mark.parametrize(
    "error",
    [
        BatonError(ErrorKind.RATE_LIMITED, "no", retry_after_s=2.5),
        BatonError(ErrorKind.DEADLINE, "no", retry_after_s=0.125),
        BatonError(ErrorKind.DEADLINE, "no"),
        BatonError(ErrorKind.OVERLOADED, "no"),
    ],
)
def test_when_to_try_again_arrives(error: BatonError) -> None:
    status = to_status(error)
    read = from_status(status.code, status.details, status.trailing_metadata)
    assert (read.kind, read.retry_after_s) == (error.kind, error.retry_after_s)


def test_the_span_of_a_failed_call_is_read() -> None:
    status = to_status(FieldError("no"))
    span = f"00-{'a' * 32}-{'b' * 16}-01"
    metadata = (*status.trailing_metadata, ("traceresponse", span))
    assert from_status(status.code, status.details, iter(metadata)).traceresponse == span
    assert from_status(status.code, status.details, status.trailing_metadata).traceresponse == ""


def test_a_long_message_fits_the_metadata() -> None:
    ((_, value),) = to_status(BatonError(ErrorKind.INTERNAL, "x" * 100_000)).trailing_metadata
    assert len(value) < 4096


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ErrorKind.UNAVAILABLE),
        (grpc.StatusCode.CANCELLED, ErrorKind.UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorKind.OVERLOADED),
        (grpc.StatusCode.UNKNOWN, ErrorKind.INTERNAL),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorKind.INTERNAL),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorKind.DEADLINE),
        (grpc.StatusCode.FAILED_PRECONDITION, ErrorKind.CONFLICT),
    ],
)
def test_a_status_of_another_server(code: grpc.StatusCode, kind: ErrorKind) -> None:
    assert from_grpc(rpc_error(code, ""), "x").kind is kind
    assert from_grpc(rpc_error(code, "", (DETAILS_KEY, b"\xff\xff nonsense")), "x").kind is kind
    other = status_pb2.Status(code=code.value[0])
    other.details.add().Pack(error_details_pb2.ErrorInfo(reason="INVALID", domain="somebody.else"))
    assert from_grpc(rpc_error(code, "", (DETAILS_KEY, other.SerializeToString())), "x").kind is kind


@pytest.mark.parametrize("kind", ErrorKind)
def test_openai_bodies(kind: ErrorKind) -> None:
    body = openai_body(BatonError(kind, "why"))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] == "why"
    assert 400 <= http_status(BatonError(kind, "why")) < 600
    assert kind.retryable <= (http_status(BatonError(kind, "why")) in (429, 503))


def test_a_field_is_named() -> None:
    error = FieldError("no", param="top_p", code="odd")
    assert openai_body(error)["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "odd",
    }
