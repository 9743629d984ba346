"""Opens the target for a URL."""

from __future__ import annotations

from collections.abc import Callable

from loadgen.common.errors import LoadgenError
from loadgen.common.settings import TargetSettings
from loadgen.targets.target import Target
from loadgen.targets.tls import is_grpc


def open_target(settings: TargetSettings, clock: Callable[[], float]) -> Target:
    """The target of grpc(s):// or http(s)://. Raises LoadgenError for other addresses. Imports only what is
    needed."""
    if is_grpc(settings.url):
        from loadgen.targets.grpc_target import GrpcTarget

        return GrpcTarget(settings, clock)
    if settings.url.startswith(("http://", "https://")):
        from loadgen.targets.http_target import HttpTarget

        return HttpTarget(settings, clock)
    raise LoadgenError(f"{settings.url!r} is no target (grpc(s)://HOST:PORT or http(s)://HOST:PORT)")
