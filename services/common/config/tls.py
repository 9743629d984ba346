"""Configuration of TLS and of API keys. All of it names files, which are read again when they change."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveFloat, model_validator

from services.common.config.types import StrictModel, fixed, setting


class InternalTls(StrictModel):
    """Mutual TLS between router, workers and supervisor, links over gRPC included."""

    cert_file: Path = setting(..., "certificate chain of this process, PEM")
    key_file: Path = setting(..., "private key of that certificate, PEM")
    ca_file: Path = setting(..., "authorities that sign the certificates of the cluster, PEM")
    domain: str = setting(
        ...,
        "domain of the DNS name that a certificate has for its role: router.DOMAIN, prefill.DOMAIN, "
        "decode.DOMAIN, workers.DOMAIN (both roles), supervisor.DOMAIN",
        pattern="^[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?$",
    )


class PublicTls(StrictModel):
    """TLS on the public HTTP and gRPC ports."""

    cert_file: Path = setting(..., "certificate chain that clients see, PEM")
    key_file: Path = setting(..., "private key of that certificate, PEM")
    client_ca_file: Path | None = setting(
        None, "authorities of the certificates that clients must present, PEM; unset: clients need none"
    )


class Tls(StrictModel):
    """TLS of a process: towards the rest of the cluster, and of a router towards clients."""

    internal: InternalTls | None = None
    public: PublicTls | None = None


class Auth(StrictModel):
    """API keys of the public ports: those of a file, or in Redis, or of tenants in both; `auth: none`: the
    ports serve everyone who reaches them."""

    api_keys_file: Path | None = setting(
        None,
        "file with the API keys of clients, one a line; without keys the router serves this machine alone, "
        "unless `auth` is `none`",
        who="everyone",
    )
    tenants_file: Path | None = setting(
        None, "YAML file of [tenants](#tenants), their keys' hashes and limits; in place of `api_keys_file`"
    )
    redis_keys: bool = setting(
        False, "accept API keys that `baton keys` has written to Redis too: [keys in Redis](#keys-in-redis)"
    )
    redis_keys_max_age_s: PositiveFloat = setting(
        3600.0, "time for which the last known keys stay valid while Redis cannot be read"
    )

    none: bool = fixed(False, "write `auth: none`")

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
