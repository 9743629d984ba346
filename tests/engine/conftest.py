from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read by Triton when a kernel's module is imported: without a GPU its interpreter runs the kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """As every engine process runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
