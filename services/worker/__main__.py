"""`python -m services.worker`: a worker, its WorkerConfig as JSON on standard input."""

from __future__ import annotations

import sys

import uvloop

from services.common.config.worker import WorkerConfig
from services.common.processes.child_protocol import run_child
from services.worker.front.process import serve

if __name__ == "__main__":
    sys.exit(run_child(WorkerConfig, serve, uvloop.new_event_loop))
