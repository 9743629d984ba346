"""Exit codes of processes that run by themselves: failed, refused, start again, name
taken."""

from __future__ import annotations

import pytest

from baton.base.errors import BatonError, ErrorKind, NameTakenError
from services.common.processes.child_protocol import RestartNeededError, exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BatonError(ErrorKind.UNAVAILABLE, "the engine ended"), 1),
        (BatonError(ErrorKind.DEADLINE, "the engine was not ready in time"), 1),
        (BatonError(ErrorKind.INTERNAL, "the engine failed"), 1),
        (BatonError(ErrorKind.INVALID, "the port is taken"), 2),
        (BatonError(ErrorKind.UNAUTHENTICATED, "Redis refused the password"), 2),
        (BatonError(ErrorKind.CONFLICT, "a newer w has registered"), 4),
        (NameTakenError("w", "host-b", "10.0.0.2:50060", kept=True), 4),
        (RestartNeededError("NCCL hangs"), 3),
    ],
)
def test_exit_codes(error: BatonError, code: int) -> None:
    assert exit_code(error) == code
