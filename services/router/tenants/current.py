"""The tenant whose API key the call has that is being served.

Both APIs check keys before anything else sees the call. A context variable hands the result on: it holds for
the task that serves the call and for those that this task starts.
"""

from __future__ import annotations

from contextvars import ContextVar

from services.router.tenants.account import TenantAccount

# None: keys belong to no tenants.
current_tenant: ContextVar[TenantAccount | None] = ContextVar("current_tenant", default=None)
