"""The target that an address asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.common.errors import LoadgenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.common.settings import TargetSettings
    from loadgen.targets.target import Target


def open_target(settings: TargetSettings, clock: Callable[[], float]) -> Target:
    """grpc:// or http(s)://; LoadgenError for any other address. Each imports only what it needs."""
    if settings.url.startswith("grpc://"):
        from loadgen.targets.grpc_target import GrpcTarget

        return GrpcTarget(settings, clock)
    if settings.url.startswith(("http://", "https://")):
        from loadgen.targets.http_target import HttpTarget

        return HttpTarget(settings, clock)
    raise LoadgenError(f"{settings.url!r} is no target (grpc://HOST:PORT or http://HOST:PORT)")
