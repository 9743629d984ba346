"""Configuration of TLS and of API keys. All of it names files, which are read again when they change."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from services.common.config.types import StrictModel


class InternalTls(StrictModel):
    """Mutual TLS between router, workers and supervisor, links over gRPC included."""

    cert_file: Path = Field(description="this process's certificate chain, PEM")
    key_file: Path = Field(description="its private key, PEM")
    ca_file: Path = Field(description="the authorities of the cluster's certificates, PEM")
    domain: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?$",
        description="a certificate has the DNS name of its role in this domain: router.DOMAIN, "
        "prefill.DOMAIN, decode.DOMAIN, workers.DOMAIN (both roles), supervisor.DOMAIN",
    )


class PublicTls(StrictModel):
    """TLS on the public HTTP and gRPC ports."""

    cert_file: Path = Field(description="the certificate chain, PEM")
    key_file: Path = Field(description="its private key, PEM")
    client_ca_file: Path | None = Field(
        None, description="authorities of clients' certificates, PEM; unset: clients need none"
    )


class Auth(StrictModel):
    """API keys of the public ports: those of a file, or in Redis, or of tenants in both; `auth: none`: the
    ports serve everyone who reaches them."""

    api_keys_file: Path | None = Field(
        None, description="a key a line; empty lines and lines that begin with # are ignored"
    )
    tenants_file: Path | None = Field(
        None, description="YAML: tenants with the SHA-256 of their keys, and their limits"
    )
    redis_keys: bool = Field(False, description="keys of tenants in Redis too, as `baton keys` writes them")
    redis_keys_max_age_s: float = Field(
        3600.0, gt=0, description="how long keys in Redis stay valid while Redis cannot be read"
    )

    none: bool = Field(False, description="explicitly no keys")

    @model_validator(mode="before")
    @classmethod
    def _none(cls, given: object) -> object:
        return {"none": True} if given == "none" else given

    @model_validator(mode="after")
    def _one_source(self) -> Auth:
        if self.none:
            if self.api_keys_file is not None or self.tenants_file is not None or self.redis_keys:
                raise ValueError("auth is none, or has keys")
            return self
        tenants = self.tenants_file is not None or self.redis_keys
        if (self.api_keys_file is None) != tenants:
            raise ValueError(
                "auth has one of api_keys_file and tenants_file, or redis_keys without the former"
            )
        return self
