"""Calls a router's AdminService from a command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TypeVar

import grpc

from baton.admin_address import DEFAULT_ADDRESS
from baton.cluster_auth import SECRET_VARIABLE, admin_metadata
from baton.errors import BatonError, ErrorKind
from baton.v1 import admin_pb2_grpc

TIMEOUT_S = 10.0
_HINT = "--admin HOST:PORT names another admin port"

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
            raise admin_error(f"no answer from {target}", error, default=address is None) from None


def bare_address(address: str | None) -> str | None:
    """The address without a leading `grpc://`."""
    return address.removeprefix("grpc://") if address else None


def admin_error(message: str, error: grpc.RpcError, *, default: bool) -> BatonError:
    """The BatonError for a failed call. `default`: no admin port was given, so the message suggests
    `--admin`."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return BatonError(ErrorKind.INTERNAL, f"{message}: {error}")
    code = error.code()
    details = " ".join((error.details() or "").split())
    if code is grpc.StatusCode.NOT_FOUND:
        return BatonError(ErrorKind.NOT_FOUND, details)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return BatonError(ErrorKind.CONFLICT, details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return BatonError(ErrorKind.UNAVAILABLE, f"{message}: {details} (set {SECRET_VARIABLE})")
    hint = f" ({_HINT})" if default else ""
    return BatonError(ErrorKind.UNAVAILABLE, f"{message}: {code.name} {details}{hint}")
