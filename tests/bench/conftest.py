from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def without_gradients() -> Iterator[None]:
    """As every bench runs; it leaves them off, and tests of other packages want them."""
    with torch.no_grad():
        yield
