"""Every kind of error on both doors, and back from gRPC."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from baton.errors import BatonError, ErrorKind
from services.common.errors import (
    KIND_METADATA,
    FieldError,
    from_grpc,
    grpc_code,
    http_status,
    openai_body,
)


def rpc_error(code: grpc.StatusCode, details: str, *metadata: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details, "")


@pytest.mark.parametrize("kind", ErrorKind)
def test_the_exact_kind_comes_back(kind: ErrorKind) -> None:
    error = rpc_error(grpc_code(kind), "why", (KIND_METADATA, kind.name.lower()))
    back = from_grpc(error, "decode-0")
    assert (back.kind, back.message) == (kind, "decode-0: why")


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
def test_a_strangers_status(code: grpc.StatusCode, kind: ErrorKind) -> None:
    assert from_grpc(rpc_error(code, ""), "x").kind is kind
    assert from_grpc(rpc_error(code, "", (KIND_METADATA, "nonsense")), "x").kind is kind


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
