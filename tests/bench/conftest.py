from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def without_gradients() -> Iterator[None]:
    """Turns gradients off, as every bench does, and on again afterwards, since tests of other packages want
    them."""
    with torch.no_grad():
        yield
