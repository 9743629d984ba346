"""The proofs by which members of one cluster show that they know its secret.

    secret ─┬─ "rpc"   ─▶ the token that every internal RPC carries in its metadata
            ├─ "admin" ─▶ the token of AdminService, where that is not on loopback alone
            ├─ "link"  ─▶ the key that both ends of a KV link sign their hello with
            │             (`kvtransfer/protocol/link_auth.py`)
            ├─ "certificates" ─▶ the key that a worker signs its certificates in the registry with
            ├─ "api keys" ─▶ the key that API keys in Redis are signed with
            ├─ "name"  ─▶ what is the same in the registry for all that share the secret
            └─ "prefix" ─▶ what cached blocks are hashed with, unless a secret of its own is configured

Each use has a key of its own, derived with HMAC-SHA256, so the secret itself is never sent. The token is a
bearer token: it does not protect against those who can read the network, against whom only TLS helps.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

MIN_SECRET_LENGTH = 16

# Environment variable with the secret. No flag has it: a process's arguments can be read by every user.
SECRET_VARIABLE = "BATON_CLUSTER_SECRET"

# Key of the metadata entry, and the one method that needs no token: liveness probes know no secret.
METADATA_KEY = "baton-cluster-token"
HEALTH_METHOD = "/grpc.health.v1.Health/Check"

UNAUTHENTICATED = "the cluster's secret is missing or differs"


def admin_metadata(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Metadata of a call to AdminService by an operator's program; empty where the variable is not set."""
    secret = environment.get(SECRET_VARIABLE)
    return RpcToken(secret, "admin").metadata if secret else ()


def link_key(secret: str) -> bytes:
    """The key of link hellos, 32 bytes."""
    return _derived(secret, b"link")


def secret_name(secret: str) -> str:
    """A public identifier of a secret: 16 hex digits of a keyed digest. Empty where there is none."""
    return _derived(secret, b"name").hex()[:16] if secret else ""


def prefix_secret(secret: str) -> str:
    """The prefix secret of a cluster that configures none: all that share the cluster's secret compute
    the same block hashes."""
    return _derived(secret, b"prefix").hex()


class RpcToken:
    """The token of one cluster's internal RPCs, or of its AdminService."""

    def __init__(self, secret: str, use: Literal["rpc", "admin"] = "rpc") -> None:
        self._token = _derived(secret, use.encode()).hex()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that authenticates a call."""
        return ((METADATA_KEY, self._token),)

    def admits(self, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """True if a call of `method` with this metadata may be answered. Compares in constant time."""
        if method == HEALTH_METHOD:
            return True
        for key, value in metadata or ():
            if key == METADATA_KEY:
                found = value if isinstance(value, bytes) else value.encode()
                return hmac.compare_digest(found, self._token.encode())
        return False


class CertificateProof:
    """Authenticates the certificates in a registry entry as those of one incarnation of a worker."""

    def __init__(self, secret: str) -> None:
        self._key = _derived(secret, b"certificates")

    def sign(self, name: str, incarnation: str, certificates: Sequence[str]) -> str:
        """The proof, in hex digits."""
        return hmac.digest(self._key, _joined((name, incarnation, *certificates)), "sha256").hex()

    def verify(self, proof: str, name: str, incarnation: str, certificates: Sequence[str]) -> bool:
        """True if `sign` made this proof. Compares in constant time."""
        expected = self.sign(name, incarnation, certificates)
        return hmac.compare_digest(proof.encode(), expected.encode())


class KeyProof:
    """Authenticates the API keys of one cluster in Redis as made by someone who has its secret."""

    def __init__(self, secret: str, namespace: str) -> None:
        self._key = _derived(secret, b"api keys")
        self._namespace = namespace

    def sign(self, key_id: str, text: str) -> str:
        """The proof of one entry, in hex digits."""
        return self._signed("entry", self._namespace, key_id, text)

    def verify(self, proof: str, key_id: str, text: str) -> bool:
        """True if `sign` made this proof. Compares in constant time."""
        return hmac.compare_digest(proof.encode(), self.sign(key_id, text).encode())

    def verify_alone(self, proof: str, text: str) -> bool:
        """True if it is the proof of an entry's text alone, as it was before clusters and ids were part of
        it."""
        expected = hmac.digest(self._key, text.encode(), "sha256").hex()
        return hmac.compare_digest(proof.encode(), expected.encode())

    def sign_all(self, generation: int, values: Mapping[str, str]) -> str:
        """The proof that the entries of a generation are these, by id, and no others."""
        parts = [part for item in sorted(values.items()) for part in item]
        return self._signed("all", self._namespace, str(generation), *parts)

    def verify_all(self, proof: str, generation: int, values: Mapping[str, str]) -> bool:
        """True if `sign_all` made this proof. Compares in constant time."""
        return hmac.compare_digest(proof.encode(), self.sign_all(generation, values).encode())

    def _signed(self, *parts: str) -> str:
        return hmac.digest(self._key, _joined(parts), "sha256").hex()


def _joined(parts: Sequence[str]) -> bytes:
    """The parts, each behind its length, so that no two lists of parts are joined alike."""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


def _derived(secret: str, use: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"baton cluster: " + use, "sha256")
