"""Settings of the ends of a worker's links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.protocol.link_auth import LinkAuth

# Links that may exist at a receiver by default, quarantined ones included: bounds staging memory and threads.
MAX_LINKS = 256


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Settings that senders and receivers have in common. `fingerprint`: of layout and model, the same at
    both ends of a link; `block_bytes`: of a block of each cache group; `peer_timeout_s`: how long a peer may
    take to answer."""

    identity: WorkerIdentity
    fingerprint: bytes
    block_bytes: Sequence[int]
    peer_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """The staging of a receiver's links in host memory: `pieces` of at most `piece_bytes` a link. Senders
    beyond `max_links` are refused."""

    piece_bytes: int
    pieces: int
    max_links: int = MAX_LINKS


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Settings that a receiver's listeners have in common. `wake` is called when a request or a frame has
    come; `peer_timeout_s`: how long a request may wait for its answer; `auth`: what senders must prove to
    know."""

    wake: Callable[[], None]
    peer_timeout_s: float
    max_links: int
    auth: LinkAuth = field(default_factory=LinkAuth)
