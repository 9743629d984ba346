"""The API keys that a configuration names, and the secret of its admin port."""

from __future__ import annotations

from baton.base.addresses import is_loopback
from baton.base.errors import BatonError, ErrorKind
from services.common.config.router import RouterConfig
from services.common.config.tls import Auth
from services.common.observability.audit_log import AuditLog
from services.common.observability.logs import get_log
from services.router.auth.api_keys import ApiKeys
from services.router.auth.keys import Keys
from services.router.auth.redis_keys import RedisKeys
from services.router.auth.tenant_keys import TenantKeys

_log = get_log("router")


def configured_keys(config: RouterConfig, audit: AuditLog) -> Keys | None:
    """The configured keys; None: the public ports need none. BatonError(INVALID) if they cannot be used."""
    if config.auth is None or config.auth.none:
        if not is_loopback(config.host):
            _log.warning("public_ports_without_api_keys", host=config.host)
        return None
    if config.auth.redis_keys and (config.state is None or not config.cluster_secret):
        raise BatonError(ErrorKind.INVALID, "auth.redis_keys needs a Redis and a cluster_secret")
    keys = _keys(config.auth)
    keys.audit_to(audit)
    return keys


def admin_secret(config: RouterConfig) -> str:
    """The secret that callers of AdminService need; empty if only this machine can reach it.

    BatonError(INVALID) if other machines can reach it and there is no secret.
    """
    if is_loopback(config.admin_host):
        return ""
    if not config.cluster_secret:
        raise BatonError(ErrorKind.INVALID, f"an admin port on {config.admin_host} needs a cluster_secret")
    return config.cluster_secret


def _keys(auth: Auth) -> Keys:
    if auth.api_keys_file is not None:
        return ApiKeys(auth.api_keys_file)
    file = TenantKeys(auth.tenants_file, needs_key=not auth.redis_keys) if auth.tenants_file else None
    if auth.redis_keys:
        return RedisKeys(file, auth.redis_keys_max_age_s)
    assert file is not None  # one of them is set
    return file
