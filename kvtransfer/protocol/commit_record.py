"""The record that commits a transfer: what early metadata says of it, and what prefill's last step adds."""

from __future__ import annotations

from baton.v1.transfer_pb2 import CommitRecord


def add_first_token(record: CommitRecord, found: CommitRecord) -> None:
    """Copies into early metadata what prefill's last step produced, and nothing else of `found`."""
    record.first_token_id, record.first_number = found.first_token_id, found.first_number
    if found.HasField("first_logprobs"):
        record.first_logprobs.CopyFrom(found.first_logprobs)
