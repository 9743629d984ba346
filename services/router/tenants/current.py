"""The caller of the call that is being served.

Both APIs check keys before anything else sees the call. A context variable hands the result on: it holds for
the task that serves the call and for those that this task starts.
"""

from __future__ import annotations

from contextvars import ContextVar

from services.router.tenants.account import TenantAccount
from services.router.tenants.caller import Caller

# None: the router has no API keys, or the route needs none.
current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)


def current_tenant() -> TenantAccount | None:
    """The tenant of the caller's key; None where there is none."""
    caller = current_caller.get()
    return None if caller is None else caller.tenant


def check_model(model: str) -> None:
    """Raises BatonError(FORBIDDEN) where the caller's key may not use this model."""
    if (caller := current_caller.get()) is not None:
        caller.require_model(model)
