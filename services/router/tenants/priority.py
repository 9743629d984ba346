"""Priorities of requests: whole numbers, of which lower ones go first."""

from __future__ import annotations

from services.router.tenants.account import TenantAccount
from services.router.tenants.tenants_file import LEAST_URGENT


def priority_of(tenant: TenantAccount | None, asked: int) -> int:
    """The priority of a request that asks for `asked`, 0 being what its tenant has (without tenants: 0).
    Requests may be less urgent than their tenant, not more."""
    base = 0 if tenant is None else tenant.priority
    return min(base + max(0, asked), LEAST_URGENT)
