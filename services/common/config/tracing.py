"""Configuration of the traces of requests."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import field_validator

from services.common.config.types import StrictModel, setting

_TRACES_PATH = "/v1/traces"


class TracingSettings(StrictModel):
    """The collector that the spans of requests are sent to. OTLP's own environment variables state the
    rest."""

    otlp_endpoint: str | None = setting(
        None,
        "URL of a collector that takes OTLP over HTTP, such as `http://collector:4318`; unset: no "
        "[traces](operations.md#traces)",
        flag=True,
    )
    otlp_headers_file: Path | None = setting(
        None,
        "file of headers for the collector, a line `name: value` each; read at the start, on every machine",
        flag=True,
    )
    sample_ratio: float = setting(
        1.0,
        "share of requests that are traced where the client does not say (`traceparent`)",
        unit="0 to 1",
        flag="trace_sample_ratio",
        ge=0,
        le=1,
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of the port
            usable = False
        if not usable:
            raise ValueError("otlp_endpoint must be an http or https URL such as http://collector:4318")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("otlp_endpoint has no credentials and no query: use otlp_headers_file")
        return url

    @property
    def traces_url(self) -> str:
        """The URL that spans are posted to; that of a collector gets OTLP's path."""
        url = (self.otlp_endpoint or "").rstrip("/")
        return url if url.endswith(_TRACES_PATH) else url + _TRACES_PATH
