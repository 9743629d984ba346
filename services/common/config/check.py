"""The configuration file of `baton check`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from services.common.config.types import StrictModel


class CheckTls(StrictModel):
    """TLS of a client of the public ports."""

    ca_file: Path | None = Field(
        None, description="authorities, PEM; unset, or not there: those of the system"
    )
    cert_file: Path | None = Field(None, description="the client's certificate chain, PEM")
    key_file: Path | None = Field(None, description="its private key, PEM")
    server_name: str | None = Field(
        None, description="name of the server's certificate; unset: the address's host"
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> CheckTls:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("tls needs both of cert_file and key_file, or neither")
        return self


class CheckFile(StrictModel):
    """What is checked."""

    http: str = Field(description="base URL of the HTTP API, http:// or https://")
    grpc: str = Field(pattern=r"^(\[[^]]+\]|[^:\s]+):\d{1,5}$", description="host:port of the gRPC API")
    model: str = Field(min_length=1, description="name of the model")
    timeout_s: float = Field(120.0, gt=0, description="longest time for everything")
    api_keys_file: Path | None = Field(None, description="file of API keys, of which the first one is used")
    tls: CheckTls = Field(CheckTls(), description="used where http is https, for gRPC too")

    @field_validator("http")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        parts = urlsplit(url)
        try:
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if not known or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError("http must be a URL such as https://HOST:PORT")
        return url.rstrip("/")

    @property
    def uses_tls(self) -> bool:
        """Whether both ports speak TLS."""
        return self.http.startswith("https:")
