"""A worker that runs canary generations ten times a second, whether requests finish or not."""

from __future__ import annotations

import runpy
import sys

from services.worker.front import process
from services.worker.front.canary import Canary

PROGRAM = (sys.executable, "-m", "tests.e2e.support.eager_canaries")

if __name__ == "__main__":
    process.INTERVAL_S = 0.1  # type: ignore[attr-defined]
    Canary.finished = lambda self: 0  # type: ignore[method-assign]
    runpy.run_module("services.worker", run_name="__main__")
