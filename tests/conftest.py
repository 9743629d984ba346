"""Settings made before any test: Triton's interpreter, threads, compiled code, and the process of `pytest -n`
that each test runs in."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.cluster.gpus.gpu_count import find_driver
from tests.support.unit_tier import forbid_processes_and_ports, is_unit

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

# Seconds that a proof at full size may take where it sets no limit of its own: several times what it takes on
# cores of usual speed.
SLOW_TIMEOUT_S = 1800
E2E = "tests/e2e/"
# Where something is due within a time. The rest of e2e may run beside a cluster of another test, and shares
# that of tests/e2e/conftest.py, so that one process alone starts it.
FAULTS = f"{E2E}faults/"
# Every process that tests the chart renders each set of its values once, which takes seconds.
CHART = "tests/deploy/"


def shares_cluster(item: pytest.Item) -> bool:
    """True if the test uses the cluster of tests/e2e/conftest.py, and not one of its module."""
    module = getattr(item, "module", None)
    return item.nodeid.startswith(E2E) and "cluster" in _fixtures(item) and not hasattr(module, "cluster")


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def process_of(nodeid: str) -> str:
    """The name of the process that a test runs in: one for e2e's faults, one for the rest of e2e, one for
    tests of the chart, and one for each other file."""
    folders = (FAULTS, E2E, CHART)
    return next((folder for folder in folders if nodeid.startswith(folder)), nodeid.partition("::")[0])


@functools.cache
def has_gpu() -> bool:
    """Asks torch only where there is a driver: the process that hands out tests does without torch."""
    if find_driver() is None:
        return False
    import torch

    return torch.cuda.is_available()


# Without a GPU its interpreter runs the kernels. Triton reads this when first imported, by whatever test.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# Hundreds of processes of ours are started: each would compile what it imports anew, a fifth of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# Go reads it when Helm's engine is loaded. By its default garbage collection takes a quarter of the time.
os.environ.setdefault("GOGC", "400")


def pytest_configure(config: pytest.Config) -> None:
    """Prepares a process that runs tests. The one that hands them out (`-n`) runs none."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        import torch
        from hypothesis import settings
        from hypothesis.internal import charmap
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.intervalsets import IntervalSet

        propagate_logs_of_torch()
        # As every engine runs: two processes of tests, and the clusters of one of them, share the cores.
        torch.set_num_threads(1)
        # No example has a deadline: nothing asserts on speed, and a busy machine stops a process for seconds.
        settings.register_profile("any machine", deadline=None)
        settings.load_profile("any machine")
        # It would parse every module of ours that is imported, to draw constants from them: seconds in each
        # process, and examples that depend on what else a process has imported.
        providers._get_local_constants = lambda: providers._local_constants
        # It would encode and decode every character, to find that all have an encoding but for surrogates.
        utf_8 = IntervalSet([(0, 0xD7FF), (0xE000, sys.maxunicode)]), IntervalSet([])
        intervals_of = charmap.intervals_from_codec
        charmap.intervals_from_codec = functools.cache(
            lambda codec: utf_8 if codec == "utf-8" else intervals_of(codec)
        )


def propagate_logs_of_torch() -> None:
    """pytest attaches its handlers to each logger that does not propagate, six times a test: torch has some
    sixty, which took half a millisecond of every test. Those that propagate reach the same handlers."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Importing all tests creates a million objects that stay: they are traversed neither meanwhile, which is
    a fifth of the time it takes, nor in every full collection after it."""
    gc.disable()
    try:
        if hasattr(session.config, "workerinput"):
            import_a_part(session.config)
        return (yield)
    finally:
        gc.freeze()
        # What tests import later is traversed as well, 0.08 s each time: by Python's own thresholds 5 % of
        # the router's tests were garbage collection.
        gc.set_threshold(10_000, 20, 20)
        gc.enable()
        # nanobind counts what is left at Python's end as leaked.
        atexit.register(gc.unfreeze)


def import_a_part(config: pytest.Config) -> None:
    """Each of several processes (`-n`) first imports its part of the tests and leaves them compiled for the
    others; all would compile all of them at the same time otherwise. What fails is reported when it is
    collected."""
    given = config.workerinput  # type: ignore[attr-defined]
    number = int(given["workerid"].removeprefix("gw"))
    part = modules(config, "test_*.py")[number :: given["workercount"]]
    # A conftest.py may register modules whose assertions are to be rewritten, before any test imports them.
    for name in (*modules(config, "conftest.py"), *part):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def modules(config: pytest.Config, pattern: str) -> list[str]:
    """Files in our folders among a command's arguments whose names match `pattern`."""
    root = Path(__file__).parents[1]
    files = {file for argument in config.args for file in Path(argument).resolve().rglob(pattern)}
    ours = [file.relative_to(root) for file in files if file.is_relative_to(root)]
    return sorted(".".join(file.with_suffix("").parts) for file in ours)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Two processes have all of e2e, so that few clusters meet on the cores; a free one takes the next file
    in the order of collection, not the one with most tests: that need not be the longest. None, so that
    xdist takes its own, where the command names one (`--dist worksteal`): "load" is what -n has without."""
    if config.option.dist != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class ByProcess(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return process_of(nodeid)

    return ByProcess(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tier of a test follows from its folder. Proofs at full size have a timeout of their own. Modules
    that have a DEVICE run on a GPU where there is one: `make prove-gpu` takes their tests, too. Among
    several processes e2e is started first, since it takes longest; there the modules that share one cluster
    are last, since it takes processor time as long as it is there. Files of all other folders take turns:
    those that wait run beside those that compute."""
    for item in items:
        if is_unit(item):
            item.add_marker(pytest.mark.unit)
        if isinstance(item, pytest.Function) and hasattr(item.module, "DEVICE"):
            item.add_marker(pytest.mark.any_device)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if hasattr(config, "workerinput"):
        rank = {FAULTS: 0, E2E: 1, CHART: 2}
        sharing = {item.path for item in items if shares_cluster(item)}
        turns = turns_of_files([item.nodeid.partition("::")[0] for item in items])

        def place(item: pytest.Item) -> tuple[int, bool, float]:
            process = process_of(item.nodeid)
            return rank.get(process, 3), item.path in sharing, turns.get(process, 0.0)

        items.sort(key=place)


def turns_of_files(files: Iterable[str]) -> dict[str, float]:
    """Places of test files among those of their folder in `tests/`, from 0 to 1: in the order of these
    places, every part of a run has the same share of each folder."""
    folders: dict[str, dict[str, None]] = {}
    for file in files:
        folders.setdefault("/".join(file.split("/")[:2]), {})[file] = None
    return {
        file: (number + 0.5) / len(folder)
        for folder in folders.values()
        for number, file in enumerate(folder)
    }


@pytest.fixture(autouse=True)
def _unit_tests_start_nothing(request: pytest.FixtureRequest) -> Generator[None]:
    """Not enforced where there is a GPU: Triton starts a process for each kernel that it compiles."""
    if request.node.get_closest_marker("unit") is None or has_gpu():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        forbid_processes_and_ports(patch)
        yield


@pytest.fixture(autouse=True)
def _gpus_have_nothing_of_earlier_tests(request: pytest.FixtureRequest) -> None:
    """Frees an earlier test's engine before the next test. The memory of an engine waits for its GPU when it
    is freed: collected among the launches of a step on several GPUs, it would wait for a kernel that waits
    for the next of these launches."""
    if request.node.get_closest_marker("multigpu") is not None:
        gc.collect()


def pytest_unconfigure() -> None:
    """Threads of links end by themselves, shortly after their link. One that Python's own end meets in the
    midst of it takes the process along (exit code 134); an engine ends without such an end."""
    deadline = time.monotonic() + 2.0
    for thread in threading.enumerate():
        if thread.name.startswith(("link-", "nccl-")):
            thread.join(max(0.0, deadline - time.monotonic()))
