"""A subscriber of a front: reads its messages from a socket, and checks that no token number is missing or
repeated.

    python -m bench.decode.token_consumer SOCKET

Runs until the stream ends; prints tokens and messages as one JSON object.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import BinaryIO

from baton.base.parent_death import die_with_parent
from baton.v1.decode_pb2 import SubscribeResponse
from bench.decode.ring_reader import LENGTH


def consume(source: BinaryIO) -> tuple[int, int]:
    """Counts tokens and messages. Raises RuntimeError where a sequence's numbers have a gap."""
    tokens = messages = 0
    following: dict[bytes, int] = {}
    while head := source.read(LENGTH.size):
        message = SubscribeResponse.FromString(source.read(*LENGTH.unpack(head)))
        messages += 1
        for output in message.outputs:
            request = output.attempt.request_id
            if output.first_number != following.get(request, 0):
                raise RuntimeError(f"token {output.first_number} came, {following.get(request, 0)} was next")
            following[request] = output.first_number + len(output.token_ids)
            tokens += len(output.token_ids)
            if output.finish_reason:
                del following[request]
    return tokens, messages


def main() -> None:
    die_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as link, link.makefile("rb") as source:
        tokens, messages = consume(source)
    print(json.dumps({"tokens_consumed": tokens, "messages_consumed": messages}), flush=True)


if __name__ == "__main__":
    main()
