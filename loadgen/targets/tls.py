"""TLS of targets, from their settings."""

from __future__ import annotations

import ssl

import grpc.aio

from baton.base.errors import BatonError
from baton.client.tls import Tls
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import TargetSettings, TlsSettings

GRPC, GRPCS = "grpc://", "grpcs://"


def is_grpc(url: str) -> bool:
    """True if a target speaks Baton's gRPC API."""
    return url.startswith((GRPC, GRPCS))


def address_of(url: str) -> str:
    """host:port of grpc(s)://host:port. Raises LoadgenError for another address."""
    address = url.removeprefix(GRPC).removeprefix(GRPCS).rstrip("/")
    if not address or "/" in address:
        raise LoadgenError(f"{url!r} is no gRPC address (grpc://HOST:PORT or grpcs://HOST:PORT)")
    return address


def grpc_channel(target: TargetSettings, options: tuple[tuple[str, int], ...]) -> grpc.aio.Channel:
    """A channel to a target's gRPC API. Raises LoadgenError where its address or a file cannot be used."""
    address = address_of(target.url)
    if not target.url.startswith(GRPCS):
        return grpc.aio.insecure_channel(address, options=options)
    tls = Tls(**target.tls.model_dump())
    try:
        return grpc.aio.secure_channel(address, tls.credentials(), options=(*options, *tls.options()))
    except BatonError as error:
        raise LoadgenError(error.message) from None


def ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """Creates the TLS context for a target's HTTP API. Raises LoadgenError if a file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:  # also ssl.SSLError
        raise LoadgenError(f"TLS: {error.strerror or error}") from None
    return context
