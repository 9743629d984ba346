"""The marker of tests that need four GPUs of one host, where `multigpu` means two or more."""

from __future__ import annotations

import pytest
import torch

NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
