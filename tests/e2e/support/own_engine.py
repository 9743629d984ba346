"""`baton up` whose engines first call `install` of a module of a test's own; no configuration reaches it.

    python -m tests.e2e.support.own_engine MODULE up …

It starts `… MODULE worker`, which starts `… MODULE engine`.

All that the module leaves alone is the real thing.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from functools import partial

from services.cli.parse import parse
from services.cli.up.command import up
from services.cli.up.local_cluster import Programs
from services.cli.up.model_folder import with_model
from services.cli.up.settings import load
from tests.e2e.support.fixed_values import fixed_values


def program(module: str) -> tuple[str, ...]:
    """The command line that `baton_up` starts instead of `baton`."""
    return (sys.executable, "-m", "tests.e2e.support.own_engine", module)


def run_up(module: str) -> int:
    config, model = with_model(load(parse(sys.argv[1:]), os.environ, fixed_values()))
    return asyncio.run(up(config, model, Programs(worker=(*program(module), "worker"))))


def run_worker(module: str) -> int:
    from services.common.config.worker import WorkerConfig
    from services.common.processes.child_protocol import run_child
    from services.worker.front.process import serve

    return run_child(WorkerConfig, partial(serve, engine_program=(*program(module), "engine")))


def run_engine(module: str) -> int:
    from services.worker.engine.process import main

    importlib.import_module(module).install()
    return main()


if __name__ == "__main__":
    named = sys.argv.pop(1)
    code = {"up": run_up, "worker": run_worker, "engine": run_engine}[sys.argv[1]](named)
    sys.stderr.flush()
    os._exit(code)  # grpc's threads may outlive a receiver that stopped
