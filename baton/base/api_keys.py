"""API keys as files and Redis describe them: hashes alone, with what each key may do and until when."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

# generate: the calls that generate or tokenise; models: which model is served; metrics: rates and metrics;
# admin: the workers' status on the web page.
KeyScope = Literal["generate", "models", "metrics", "admin"]

TENANT_NAME = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"

_ModelName = Annotated[str, Field(min_length=1, max_length=256)]


class KeyGrant(BaseModel):
    """One key. An unknown field is an error, since it may restrict what the key may do."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="hex digest of the key")
    id: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$",
        description="names the key in public; unset: the first 12 digits of its SHA-256",
    )
    scopes: tuple[KeyScope, ...] | None = Field(None, description="unset: all")
    models: tuple[_ModelName, ...] | None = Field(
        None, max_length=64, description="names of models that it may use; unset: all"
    )
    expires: AwareDatetime | None = Field(None, description="with a time zone; unset: never")

    @property
    def key_id(self) -> str:
        """The key's public name; by default the one derived from its hash."""
        return self.id or default_key_id(bytes.fromhex(self.sha256))


class ApiKey(KeyGrant):
    """An API key in Redis, with its tenant."""

    tenant: str = Field(pattern=TENANT_NAME)


def key_hash(key: str) -> bytes:
    """Returns the SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def default_key_id(hashed: bytes) -> str:
    """The id of a key that was given none, by its SHA-256."""
    return hashed.hex()[:12]
