"""The plain-torch engine on a GPU: what the CPU computes, and as independent of neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.sequence import SamplingParams
from tests.engine.local_engine import LocalEngine

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 4, 5, 16, 17, 33)]


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "drawn"])
def test_float64_tokens_are_the_cpus(tmp_path: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature, top_k=20, top_p=0.95, seed=11)
    outputs = []
    for device in ("cpu", "cuda"):
        engine = LocalEngine(tmp_path / "model", slots=len(PROMPTS), device=device, dtype="float64")
        keys = [engine.start(prompt, max_tokens=12, sampling=sampling) for prompt in PROMPTS]
        outputs.append(engine.run(*keys))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_never_depends_on_its_neighbours(tmp_path: Path, dtype: str) -> None:
    alone = []
    for prompt in PROMPTS:
        engine = LocalEngine(tmp_path / "model", block_tokens=16, chunk=64, device="cuda", dtype=dtype)
        alone += engine.run(engine.start(prompt, max_tokens=12))
    together = LocalEngine(tmp_path / "model", slots=len(PROMPTS), chunk=5, device="cuda", dtype=dtype)
    keys = []
    for prompt in PROMPTS:
        keys.append(together.start(prompt, max_tokens=12))
        together.step()
    assert together.run(*keys) == alone
