"""What is said before any test: Triton's interpreter, threads, compiled code; which tests run in one process
(`pytest -n`)."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

E2E = "tests/e2e/"
# Of these, what may run beside a cluster of another test: nothing in them is due at a time.
PATIENT = tuple(
    f"{E2E}test_{name}.py"
    for name in (
        "bad_commands",
        "bench_transfer",
        "demo",
        "demo_model",
        "exact_tokens",
        "kv_wire",
        "metrics",
        "pools",
        "prefix_cache",
        "separation",
        "shared_namespace",
        "strangers",
    )
)

# Without a GPU its interpreter runs the kernels. Triton reads this when first imported, by whatever test.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# As every engine runs: two processes of tests, and the clusters of one of them, share the cores.
torch.set_num_threads(1)

# Hundreds of processes of ours are started: each would compile what it imports anew, a fifth of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Importing all tests creates a million objects that stay: they are traversed neither meanwhile, which is
    a fifth of the time it takes, nor in every full collection after it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """All of e2e but the patient in one, so that no two clusters meet on the cores; else tests by file. They
    are started in the order of collection, not the files with many tests first: those need not take long."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return E2E if file.startswith(E2E) and file not in PATIENT else file

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several processes e2e comes first: it takes one of them to the end, and its patient files have
    tests of many seconds, for which nobody is to wait at last."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not item.nodeid.startswith(E2E), item.nodeid.startswith(PATIENT)))


def pytest_unconfigure() -> None:
    """Threads of links end by themselves, a moment after their link. One that Python's own end meets in the
    midst of it takes the process along (exit code 134); an engine ends without such an end."""
    deadline = time.monotonic() + 2.0
    for thread in threading.enumerate():
        if thread.name.startswith(("link-", "nccl-")):
            thread.join(max(0.0, deadline - time.monotonic()))
