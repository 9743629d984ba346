"""The maker of a call, and what its API key permits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.base.api_keys import KeyGrant, KeyScope
from baton.base.errors import BatonError, ErrorKind
from services.router.tenants.account import TenantAccount


@dataclass(frozen=True, slots=True)
class Caller:
    """The maker of a call. `key_id` names the key in public. `tenant`: None where keys belong to no tenants.
    `scopes`, `models`: None: all."""

    key_id: str
    tenant: TenantAccount | None = None
    scopes: Collection[KeyScope] | None = None
    models: Collection[str] | None = None

    @classmethod
    def of(cls, key: KeyGrant, tenant: TenantAccount) -> Caller:
        """The caller with this key of this tenant."""
        return cls(key.key_id, tenant, key.scopes, key.models)

    @property
    def tenant_name(self) -> str:
        """Name of the tenant; empty if keys belong to no tenants."""
        return "" if self.tenant is None else self.tenant.name

    def require(self, scope: KeyScope) -> None:
        """Raises BatonError(FORBIDDEN) where the key does not have the scope."""
        if self.scopes is not None and scope not in self.scopes:
            raise BatonError(ErrorKind.FORBIDDEN, f"this API key does not have the scope {scope}")

    def may_use(self, model: str) -> bool:
        """True if the key may use this model."""
        return self.models is None or model in self.models

    def require_model(self, model: str) -> None:
        """Raises BatonError(FORBIDDEN) where the key may not use this model."""
        if not self.may_use(model):
            raise BatonError(ErrorKind.FORBIDDEN, "this API key may not use this model")
