"""A router whose gRPC messages are limited to 320 KiB: what takes minutes at 32 MiB happens in seconds."""

from __future__ import annotations

import runpy
import sys

from services.common.rpc import grpc_server

LIMIT_BYTES = 320 << 10
PROGRAM = (sys.executable, "-m", "tests.e2e.support.small_messages")

if __name__ == "__main__":
    grpc_server.MAX_MESSAGE_BYTES = LIMIT_BYTES
    runpy.run_module("services.router", run_name="__main__")
