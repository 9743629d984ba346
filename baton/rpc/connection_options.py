"""gRPC options that the cluster's connections have in common: keepalive, sizes of messages, own ports."""

from __future__ import annotations

from typing import TypeAlias

Option: TypeAlias = tuple[str, int]

# A process that is stopped or cut off is noticed within the sum of the two: gRPC's own threads answer pings,
# however busy its loop is.
PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 1.25

# With SO_REUSEPORT two servers could bind one port without an error.
EXCLUSIVE_PORT: Option = ("grpc.so_reuseport", 0)


def keepalive(interval_s: float, timeout_s: float) -> list[Option]:
    """Pings the peer every `interval_s`, with or without calls; the connection breaks where one is not
    answered within `timeout_s`."""
    timeout_ms = int(timeout_s * 1000)
    return [
        ("grpc.keepalive_time_ms", int(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # This one applies to a stopped peer: without it a lost ping is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def message_limits(largest_bytes: int) -> list[Option]:
    """Admits messages of up to `largest_bytes` in both directions."""
    return [
        ("grpc.max_receive_message_length", largest_bytes),
        ("grpc.max_send_message_length", largest_bytes),
    ]


def member_options(
    largest_bytes: int, interval_s: float = PING_INTERVAL_S, timeout_s: float = PING_TIMEOUT_S
) -> list[Option]:
    """Options of a connection between two members of a cluster, by `message_limits` and `keepalive`."""
    return [
        *message_limits(largest_bytes),
        *keepalive(interval_s, timeout_s),
        # A connection without calls is pinged for as long as it is open.
        ("grpc.http2.max_pings_without_data", 0),
        # Otherwise the channels of one process share connections, and with them their failures.
        ("grpc.use_local_subchannel_pool", 1),
    ]
