"""Calls a router's AdminService from a command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import grpc

from baton.base.admin_address import DEFAULT_ADDRESS
from baton.base.cluster_auth import SECRET_VARIABLE, admin_metadata
from baton.base.errors import BatonError, ErrorKind
from baton.rpc.grpc_errors import DETAILS_KEY, from_status
from baton.v1 import admin_pb2_grpc

TIMEOUT_S = 10.0
_HINT = "--admin HOST:PORT names another admin port"
_WRONG_CALL = (ErrorKind.INVALID, ErrorKind.NOT_FOUND, ErrorKind.CONFLICT)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


def add_admin_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--admin HOST:PORT`, without a default, since a command may also have a public address."""
    parser.add_argument(
        "--admin", metavar="HOST:PORT", help=f"the router's admin gRPC port (default {DEFAULT_ADDRESS})"
    )


def admin_call(address: str | None, call: Callable[[admin_pb2_grpc.AdminServiceStub, Metadata], T]) -> T:
    """Returns `call(stub, metadata)` for the AdminService at `address`, by default that on loopback's default
    port.

    Raises BatonError with the router's error, or UNAVAILABLE where it does not answer.
    """
    target = bare_address(address) or DEFAULT_ADDRESS
    with grpc.insecure_channel(target) as channel:
        try:
            return call(admin_pb2_grpc.AdminServiceStub(channel), admin_metadata(os.environ))
        except grpc.RpcError as error:
            raise call_error(target, error, default=address is None) from None


def bare_address(address: str | None) -> str | None:
    """The address without a leading `grpc://`."""
    return address.removeprefix("grpc://") if address else None


def call_error(
    address: str, error: grpc.RpcError, *, default: bool, variable: str = SECRET_VARIABLE
) -> BatonError:
    """Returns the error that every command reports if its call to the router at `address` failed. `default`:
    no admin port was given, so the message suggests `--admin`. `variable`: has the secret or key that this
    port needs.

    The kind is the router's where the call itself is wrong (INVALID, NOT_FOUND, CONFLICT), else UNAVAILABLE.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return BatonError(ErrorKind.INTERNAL, f"no answer from {address}: {error}")
    code, details = error.code(), " ".join((error.details() or "").split())
    metadata = tuple(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return BatonError(ErrorKind.UNAVAILABLE, f"{address}: {details} (set {variable})")
    if any(key == DETAILS_KEY for key, _ in metadata):  # the router's own answer
        kind = from_status(code, details, metadata).kind
        return BatonError(kind if kind in _WRONG_CALL else ErrorKind.UNAVAILABLE, details)
    hint = f" ({_HINT})" if default else ""
    return BatonError(ErrorKind.UNAVAILABLE, f"no answer from {address}: {code.name} {details}{hint}")
