"""The recorder that a process's configuration asks for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from baton.base.errors import BatonError, ErrorKind
from services.common.config.tracing import TracingSettings
from services.common.observability.tracing.recorder import SpanRecorder


def configured_recorder(settings: TracingSettings, service: str, instance: str = "") -> SpanRecorder | None:
    """A recorder of the spans of `service`, whose instance has this name; None where no endpoint is set.

    Raises BatonError(INVALID) where OpenTelemetry is not installed, or something configured cannot be used.
    """
    if settings.otlp_endpoint is None:
        return None
    try:
        from services.common.observability.tracing.otlp import OtlpExporter  # takes 0.3 s
    except ModuleNotFoundError as error:
        message = (
            f"traces need packages that are not installed ({error.name}): pip install 'baton-serve[otel]'"
        )
        raise BatonError(ErrorKind.INVALID, message) from None
    resource = {"service.name": service, "service.namespace": "baton", "service.version": _version()}
    if instance:
        resource["service.instance.id"] = instance
    return SpanRecorder(OtlpExporter(settings, resource))


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0"
