"""Mutual authentication of a link's ends: each proves that it knows the cluster's secret.

    sender                                                             receiver
                    ◀── challenge ──                                   valid once, for `LIFETIME_S`
      hello: request, challenge, nonce, HMAC of all three ──▶          verified before any memory is allocated
                    ◀── answer: response, HMAC of it and the hello ──  verified before anything is sent

The MAC is HMAC-SHA256 under a key derived from the secret (`baton/base/cluster_auth.py`). An issued challenge
takes no memory: it carries its time and a MAC under a key that only its listener has.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import threading
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from baton.base.cluster_auth import UNAUTHENTICATED, RpcToken, link_key
from baton.base.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import (
    OpenLinkRequest,
    OpenLinkResponse,
    SignedOpenLinkRequest,
    SignedOpenLinkResponse,
)

LIFETIME_S = 10.0
NONCE_BYTES = 16
_TIME = struct.Struct("<d")
_SEAL_BYTES = 32
_CHALLENGE_BYTES = _TIME.size + NONCE_BYTES + _SEAL_BYTES


class Challenges:
    """The challenges of one listener. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        # Challenges redeemed within their lifetime, oldest first; only holders of the secret add to them.
        self._redeemed: dict[bytes, float] = {}

    def issue(self) -> bytes:
        """Creates a challenge, which carries its time and a seal."""
        body = _TIME.pack(self._clock()) + secrets.token_bytes(NONCE_BYTES)
        return body + self._seal(body)

    def redeem(self, challenge: bytes) -> bool:
        """True once for a challenge that was issued here and has not expired; marks it as redeemed."""
        body, seal = challenge[:-_SEAL_BYTES], challenge[-_SEAL_BYTES:]
        if len(challenge) != _CHALLENGE_BYTES or not hmac.compare_digest(seal, self._seal(body)):
            return False
        (issued,) = _TIME.unpack_from(body)
        with self._lock:
            now = self._clock()
            while self._redeemed and now > self._redeemed[oldest := next(iter(self._redeemed))]:
                del self._redeemed[oldest]
            if now > issued + LIFETIME_S or challenge in self._redeemed:
                return False
            self._redeemed[challenge] = now + LIFETIME_S
            return True

    def _seal(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")


class LinkAuth:
    """Signs and verifies the messages of the handshake. With an empty secret any peer is accepted."""

    def __init__(self, secret: str = "") -> None:
        self.token = RpcToken(secret)
        self._key = link_key(secret)

    def hello(self, request: OpenLinkRequest, challenge: bytes) -> SignedOpenLinkRequest:
        """The sender's signed request, in answer to a challenge."""
        hello = SignedOpenLinkRequest(
            request=request.SerializeToString(),
            challenge=challenge,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        hello.proof = self._proof_of(hello)
        return hello

    def verify_hello(self, hello: SignedOpenLinkRequest, challenges: Challenges) -> OpenLinkRequest:
        """The request in a hello, at the receiver. BatonError: UNAUTHENTICATED, or INVALID where it cannot be
        parsed."""
        right = hmac.compare_digest(hello.proof, self._proof_of(hello))
        if not (right and len(hello.nonce) == NONCE_BYTES and challenges.redeem(hello.challenge)):
            raise BatonError(ErrorKind.UNAUTHENTICATED, f"no link: {UNAUTHENTICATED}")
        try:
            return OpenLinkRequest.FromString(hello.request)
        except DecodeError as error:
            raise BatonError(ErrorKind.INVALID, "the link request cannot be parsed") from error

    def answer(self, hello: SignedOpenLinkRequest, response: OpenLinkResponse) -> SignedOpenLinkResponse:
        """The receiver's signed answer to a verified hello."""
        serialised = response.SerializeToString()
        return SignedOpenLinkResponse(
            response=serialised, proof=self._mac(b"answer", hello.proof, serialised)
        )

    def verify_answer(self, hello: SignedOpenLinkRequest, answer: SignedOpenLinkResponse) -> OpenLinkResponse:
        """The response in an answer, at the sender. BatonError: UNAUTHENTICATED, or INVALID where it cannot
        be parsed."""
        if not hmac.compare_digest(answer.proof, self._mac(b"answer", hello.proof, answer.response)):
            raise BatonError(
                ErrorKind.UNAUTHENTICATED, f"the receiver is not authenticated: {UNAUTHENTICATED}"
            )
        try:
            return OpenLinkResponse.FromString(answer.response)
        except DecodeError as error:
            raise BatonError(ErrorKind.INVALID, "the receiver's answer cannot be parsed") from error

    def probe_proof(self, hello: SignedOpenLinkRequest) -> bytes:
        """Returns the proof that a receiver sends with its probe page, the first memory that it has the
        sender map."""
        return self._mac(b"page", hello.proof)

    def verify_probe(self, hello: SignedOpenLinkRequest, proof: bytes) -> None:
        """Verifies `probe_proof` at the sender. BatonError(UNAUTHENTICATED)."""
        if not hmac.compare_digest(proof, self.probe_proof(hello)):
            raise BatonError(
                ErrorKind.UNAUTHENTICATED, f"the listener is not authenticated: {UNAUTHENTICATED}"
            )

    def frames_secret(self, nccl_id: bytes) -> bytes:
        """Returns the secret that a link's frame socket starts with; `nccl_id` identifies the link."""
        return self._mac(b"frames", nccl_id)

    def _proof_of(self, hello: SignedOpenLinkRequest) -> bytes:
        return self._mac(b"hello", hello.request, hello.challenge, hello.nonce)

    def _mac(self, *parts: bytes) -> bytes:
        """Computes the MAC over each part with its length, so that different lists of parts never have the
        same input."""
        joined = b"".join(struct.pack("<I", len(part)) + part for part in parts)
        return hmac.digest(self._key, joined, "sha256")
