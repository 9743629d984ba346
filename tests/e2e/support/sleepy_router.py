"""A router whose event loop stands still for a while at SIGUSR1, and whose gRPC threads go on meanwhile."""

from __future__ import annotations

import runpy
import signal
import sys
import time
from types import FrameType

SLEEP_S = 18.0
PROGRAM = (sys.executable, "-m", "tests.e2e.support.sleepy_router")


def _stand_still(number: int, frame: FrameType | None) -> None:
    time.sleep(SLEEP_S)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _stand_still)
    runpy.run_module("services.router", run_name="__main__")
