"""`baton up` with engines that verify every piece and then do as TAMPER says: `keep` it, or `drop` it.

    python -m tests.e2e.tampered up …      starts `… worker` processes, which start `… engine` processes

All but the sink of verified bytes is the real thing, so whatever differs came by way of these bytes.
"""

from __future__ import annotations

import asyncio
import os
import sys

from baton.cli.local_cluster import Programs
from baton.cli.main import _parser
from baton.cli.model_folder import with_model
from baton.cli.settings import load
from baton.cli.up import up

TAMPER = "BATON_TEST_TAMPER"
THIS = (sys.executable, "-m", "tests.e2e.tampered")


def run_up() -> int:
    config, model = with_model(load(_parser().parse_args(), os.environ))
    return asyncio.run(up(config, model, Programs(worker=(*THIS, "worker"))))


def run_worker() -> int:
    from services.common.child import run_child
    from services.common.config import WorkerConfig
    from services.worker import engine_launch
    from services.worker.front import serve

    engine_launch.ENGINE_PROGRAM = (*THIS, "engine")
    return run_child(WorkerConfig, serve)


def run_engine() -> int:
    from services.worker.decode_side import DecodeSide
    from services.worker.engine_process import main

    if os.environ[TAMPER] == "drop":
        DecodeSide.scatter = lambda *piece: None  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    code = {"up": run_up, "worker": run_worker, "engine": run_engine}[sys.argv[1]]()
    sys.stderr.flush()
    os._exit(code)  # grpc's threads may outlive a receiver that stopped
