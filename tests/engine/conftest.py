"""Without a GPU, kernels run in Triton's interpreter."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    from tests.support.triton_interpreter import make_launches_cheap

    make_launches_cheap()
