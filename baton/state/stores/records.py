"""Records of the state stores."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MemberRole = Literal["prefill", "decode", "both", "router"]

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
_Incarnation = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Word = Annotated[str, Field(max_length=256)]
_Pem = Annotated[str, Field(max_length=16_384)]


def new_incarnation() -> str:
    """A random id of one process start: 32 hex digits."""
    return uuid.uuid4().hex


class Member(BaseModel):
    """One start of a worker or router: identity, addresses and limits."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: _Name = Field(description="stable within the cluster, such as decode-0")
    incarnation: _Incarnation = Field(description="fresh at each start")
    role: MemberRole
    rank: int = Field(0, ge=0)
    rank_count: int = Field(1, ge=1)
    model: _Word = Field("", description="served model name; a router uses workers of its own model")
    host: _Word = Field("", description="the machine; pairs on one host are preferred")
    group: _Word = Field("", description="shared by the workers of a container; pairs are preferred")
    addresses: dict[_Word, _Word] = Field(default_factory=dict, max_length=16)
    fingerprint: str = Field("", max_length=256, description="hex; equal where KV may pass between two")
    secret_name: str = Field("", max_length=64, description="equal for members with the same cluster secret")
    limits: dict[_Word, int] = Field(default_factory=dict, max_length=64)
    draining: bool = False
    certificates: tuple[_Pem, ...] = Field(
        (), max_length=4, description="with TLS the chains, in PEM, of which it presents one"
    )
    certificates_proof: str = Field("", max_length=64, description="binds them to name and incarnation")


@dataclass(frozen=True)
class Listed:
    """A member with a live lease. `generation` orders the incarnations of one name: higher is newer."""

    member: Member
    generation: int


@dataclass(frozen=True)
class Kept:
    """A member that keeps its name from further starts, and when its lease ends, in ms on the registry's
    clock. One that lives renews it every second."""

    member: Member
    lease_end_ms: int


@dataclass(frozen=True)
class Listing:
    """All live members. An `epoch` that differs from the previous one means that the registry was wiped."""

    epoch: str
    entries: tuple[Listed, ...]


@dataclass(frozen=True)
class JournalRecord:
    """An accepted request, with all that another router needs. Never logged, never stored unencrypted."""

    request_id: bytes
    tenant: str
    token_ids: tuple[int, ...]
    attempt: int = 1
    # Opaque to this package.
    details: bytes = b""


@dataclass(frozen=True)
class JournalWrite:
    """One change of the journal. `append` has the sealed body and its lifetime."""

    request_id: bytes
    action: Literal["append", "attempt", "close"]
    attempt: int = 0
    body: bytes = b""
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketAsk:
    """A router's report on a limit per minute. `balance`: what the router holds; negative: what it has used
    beyond that. `wanted`: what it would need to hold for a call that it has refused; 0: none."""

    per_minute: int
    balance: float
    wanted: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotAsk:
    """A router's report on a limit of concurrent requests. `running`: at this router. `wanted`: how many it
    would run."""

    most: int
    running: int
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class QuotaAsk:
    """A router's report on the limits of one tenant. Limits that it does not have are None."""

    tenant: str
    buckets: tuple[BucketAsk | None, ...]
    slots: SlotAsk | None = None


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """A store's answer for one tenant. `changes`: of what the router holds of each bucket, by which it may be
    negative. `slots`: how many may run there."""

    changes: tuple[float, ...]
    slots: int


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A store's answer to a router. `routers`: how many hold leases. `grants`: in the order of what was
    asked."""

    routers: int
    grants: tuple[QuotaGrant, ...]
