"""Router, load generator, command line and links start without torch, triton, Ray or transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO_MODEL = Path(__file__).parents[1] / "baton" / "demo_model"

BLOCKED_THEN = """
import importlib.abc
import sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "ray", "transformers"}:
            raise ImportError(f"{name} is not to be imported here")

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    "module",
    [
        "services.router.__main__, services.router.process",
        "loadgen.__main__, loadgen.cli",
        # All commands.
        "baton.cli.main, baton.cli.up.command, baton.cli.demo.command; baton.cli.main._parser()",
        "kvtransfer.receiver.receiver, kvtransfer.sender.sender",
    ],
)
def test_starts_without_torch(module: str) -> None:
    script = f"{BLOCKED_THEN}\nimport {module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


LEAN = """
import sys
from services.worker.engine.main import load_torch
load_torch()
import services.worker.engine.process
assert "torch._meta_registrations" not in sys.modules
from tests.test_imports import shapes_of_the_demo_model
print(shapes_of_the_demo_model())
"""


def shapes_of_the_demo_model() -> str:
    """Those of its products, of weights without memory."""
    import torch

    from baton.engine.model.families.registry import load_config
    from services.worker.engine.startup.kernel_tuning import product_shapes

    return repr(product_shapes(load_config(DEMO_MODEL), torch.bfloat16))


def test_an_engine_leaves_out_what_only_tuning_needs() -> None:
    """And has it where it tunes, which says the same as with all of torch."""
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{shapes_of_the_demo_model()}\n" != "[]\n"


def test_the_block_blocks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{BLOCKED_THEN}\nimport torch"], capture_output=True, text=True
    )
    assert "torch is not to be imported here" in done.stderr
