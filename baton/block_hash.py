"""The names of KV blocks: one cryptographic hash a full block, chained, so that a name stands for every token
up to the block's end.

    seed    = H(HMAC(secret, tenant), model fingerprint, adapter, cache dtype)
    block i = H(block i-1, its token ids)        block -1 is the seed

Fields are length-prefixed, so no two lists of fields are one string of bytes. Whoever lacks the secret can
name no block, and no tenant's names are another's. Shared by router, state and engine; torch-free.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

HASH_BYTES = 16
# How many names of a prompt's blocks a reservation may carry: those of 262,144 tokens in blocks of 64.
MAX_RESERVE_HASHES = 4096


def seed_of(secret: bytes, *, tenant: str, model: bytes, adapter: str, cache_dtype: str) -> bytes:
    """Where the chains of one tenant begin. `model`: the fingerprint of weights and cache layout."""
    owner = hmac.digest(secret, tenant.encode(), "sha256")
    return _hash(owner, model, adapter.encode(), cache_dtype.encode())


class BlockHasher:
    """Names the full blocks of token sequences; what is left behind the last full block has no name."""

    @classmethod
    def of_cache(
        cls, secret: bytes, *, tenant: str, fingerprint: bytes, cache_dtype: str, block_tokens: int
    ) -> BlockHasher:
        """A tenant's, for a worker's cache: what router and worker must agree on to the bit."""
        seed = seed_of(secret, tenant=tenant, model=fingerprint, adapter="", cache_dtype=cache_dtype)
        return cls(seed, block_tokens)

    def __init__(self, seed: bytes, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError("a block holds at least one token")
        self.seed = seed
        self.block_tokens = block_tokens
        self._pack = struct.Struct(f"<{block_tokens}I").pack

    def hashes(self, token_ids: Sequence[int], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """One hash a full block, in order. `known`: those of the first blocks, taken as they are."""
        size, found = self.block_tokens, list(known)
        last = found[-1] if found else self.seed
        for start in range(len(found) * size, len(token_ids) - size + 1, size):
            last = _hash(last, self._pack(*token_ids[start : start + size]))
            found.append(last)
        return tuple(found)


def _hash(*fields: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()
