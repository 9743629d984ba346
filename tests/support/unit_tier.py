"""The tier `unit`: tests of folders that start no process and open no port, which is enforced."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from typing import NoReturn

import pytest

FOLDERS = (
    "tests/engine/gemm_dispatch/",
    "tests/engine/memory/",
    "tests/engine/plan/",
    "tests/engine/prefix_cache/",
    "tests/engine/sampling/",
    "tests/engine/tuning/",
    "tests/kvtransfer/device/",
    "tests/kvtransfer/protocol/",
    "tests/loadgen/analysis/",
    "tests/loadgen/generator/",
    "tests/loadgen/goodput/",
    "tests/loadgen/sizing/",
    "tests/model_spec/",
    "tests/perf_model/",
    "tests/request_fields/",
    "tests/router/conversations/",
    "tests/router/request/",
    "tests/router/tools/",
    "tests/scaling/",
    "tests/services_common/config/",
    "tests/services_common/engine/",
    "tests/support/",
    "tests/worker/engine/startup/",
)


def is_unit(item: pytest.Item) -> bool:
    return item.nodeid.startswith(FOLDERS)


def forbid_processes_and_ports(patch: pytest.MonkeyPatch) -> None:
    """Fails the test that starts a process or binds a socket, of grpc's own server too."""

    def refuse(*_arguments: object, **_options: object) -> NoReturn:
        pytest.fail("a unit test starts no process and binds no socket: tests/support/unit_tier.py")

    patch.setattr(socket.socket, "bind", refuse)
    patch.setattr(subprocess, "Popen", refuse)
    patch.setattr(os, "fork", refuse)
    patch.setattr(multiprocessing.Process, "start", refuse)
    if "grpc.aio" in sys.modules:
        import grpc.aio

        patch.setattr(grpc.aio.Server, "add_insecure_port", refuse)
        patch.setattr(grpc.aio.Server, "add_secure_port", refuse)


if __name__ == "__main__":
    print(*FOLDERS)
