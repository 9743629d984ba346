"""Engines leave out torch's Python kernels for tensors without memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.engine.model.families.registry import load_config
from services.worker.engine.main import META_KERNELS
from services.worker.engine.startup.kernel_tuning import product_shapes
from tests.support.checkpoints import FAMILIES, MIXTURES, Case

# An engine that has loaded all that it imports, and is then given no configuration.
ENGINE = """
import contextlib, json, sys
from pathlib import Path
from services.worker.engine import main
with contextlib.suppress(ValueError):
    main.main()
import torch
from baton.engine.model.families.registry import load_config
from services.worker.engine.startup.kernel_tuning import product_shapes
products = product_shapes(load_config(Path(sys.argv[1])), torch.bfloat16)
print(json.dumps([hasattr(sys.modules[main.META_KERNELS], "__file__"), str(products)]))
"""


def test_torch_has_them() -> None:
    """A torch that has them elsewhere would load them again."""
    assert sys.modules[META_KERNELS].__file__


@pytest.mark.slow
@pytest.mark.parametrize("case", [FAMILIES[0], MIXTURES[0]], ids=str)
def test_shapes_of_products_are_the_same(tmp_path: Path, case: Case) -> None:
    """Weights without memory are what kernels are tuned for at a worker's start."""
    folder = case.make(tmp_path)
    command = [sys.executable, "-c", ENGINE, str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    loaded, products = json.loads(done.stdout)
    assert not loaded
    assert products == str(product_shapes(load_config(folder), torch.bfloat16))
