"""The file of tenants: names, SHA-256 hashes of API keys, limits."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import yaml
from pydantic import Field, StringConstraints, ValidationError

from baton.base.api_keys import TENANT_NAME, KeyGrant
from baton.base.errors import BatonError, ErrorKind
from services.common.config.types import StrictModel

_MOST_TENANTS = 1_000
_MOST_KEYS = 10_000
_MOST_PER_MINUTE = 10**12
# Priorities, the most and the least urgent.
MOST_URGENT, LEAST_URGENT = -8, 8
# Built on libyaml, if PyYAML is: the file is read on the event loop.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

KeyHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
PerMinute = Annotated[int, Field(ge=1, le=_MOST_PER_MINUTE)]


class TenantLimits(StrictModel):
    """Limits of a tenant at one router. Unset: without limit."""

    requests_per_minute: PerMinute | None = Field(None, description="calls that generate")
    prompt_tokens_per_minute: PerMinute | None = None
    output_tokens_per_minute: PerMinute | None = Field(
        None, description="a request takes its max_tokens and gives back what it did not use"
    )
    concurrent_requests: int | None = Field(
        None, ge=1, le=1_000_000, description="outputs that run or wait; a call with n outputs counts as n"
    )


class Tenant(StrictModel):
    """One tenant. Without keys, no call can be made in its name."""

    name: str = Field(pattern=TENANT_NAME)
    keys_sha256: tuple[KeyHash, ...] = Field((), description="hex digests of API keys that may do everything")
    keys: tuple[KeyGrant, ...] = Field((), description="API keys with what they may do, and until when")
    weight: float = Field(
        1.0, ge=0.001, le=1000, description="its share where tenants wait, relative to others' weights"
    )
    priority: int = Field(
        0,
        ge=MOST_URGENT,
        le=LEAST_URGENT,
        description="lower goes first; the most urgent that its requests may have",
    )
    limits: TenantLimits = TenantLimits()

    @property
    def grants(self) -> tuple[KeyGrant, ...]:
        """All of the tenant's keys."""
        return (*(KeyGrant(sha256=one) for one in self.keys_sha256), *self.keys)


class TenantsFile(StrictModel):
    """The whole file of tenants."""

    tenants: tuple[Tenant, ...] = Field(max_length=_MOST_TENANTS)


def parse_tenants(text: str) -> TenantsFile:
    """Parses and checks a file's YAML. BatonError(INVALID), in one line, without a rejected value."""
    try:
        values = yaml.load(text, _LOADER)  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise _invalid(f"not valid YAML{line}") from None
    except (yaml.YAMLError, RecursionError):
        raise _invalid("not valid YAML") from None
    try:
        file = TenantsFile.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        problem = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise _invalid(f"{place}: {problem[0].lower()}{problem[1:]}") from None
    _check_unique(file)
    return file


def _check_unique(file: TenantsFile) -> None:
    names = Counter(tenant.name for tenant in file.tenants)
    if twice := [name for name, count in names.items() if count > 1]:
        raise _invalid(f"the tenant {twice[0]} is there twice")
    owners: dict[str, str] = {}
    ids = set()
    for tenant in file.tenants:
        for key in tenant.grants:
            if key.sha256 in owners:
                raise _invalid(f"a key of {tenant.name} is also one of {owners[key.sha256]}")
            if key.key_id in ids:
                raise _invalid(f"the key id {key.key_id} is there twice")
            owners[key.sha256] = tenant.name
            ids.add(key.key_id)
    if len(owners) > _MOST_KEYS:
        raise _invalid(f"more than {_MOST_KEYS} keys")


def _invalid(problem: str) -> BatonError:
    return BatonError(ErrorKind.INVALID, f"tenants_file: {problem}")
