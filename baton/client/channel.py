"""Parts that both clients' channels and calls share: options, and the metadata of an API key."""

from __future__ import annotations

_MAX_MESSAGE_BYTES = 32 * 1024 * 1024
CONNECT_S = 10.0

# A dead router is noticed within 15 s. Nothing is sent twice: whether to is the caller's to judge.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
)


def metadata_of(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of each call."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
