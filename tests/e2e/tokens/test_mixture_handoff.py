"""A mixture whose prompts are computed at full width, and handed over to a worker that holds its experts in
fp8."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.e2e.support.cluster import assert_all_free, baton_up
from tests.engine.passes import Passes
from tests.support.checkpoints import MIXTURES, VOCAB_SIZE

CONFIG = "engine_of_role: {decode: {quantization: fp8}}\n"
COUNT = 24


def expected(folder: Path, prompt: list[int]) -> list[int]:
    """The first token by the one model, the others by the other, over the first one's keys and values."""
    wide = Passes(folder, torch.float32)
    narrow = Passes(folder, torch.float32, quantization="fp8")
    output = [int(wide.run([(0, 0, prompt)])[0][-1].argmax())]
    for mine, theirs in zip(narrow.cache.groups, wide.cache.groups, strict=True):
        mine.copy_(theirs)
    while len(output) < COUNT:
        position = len(prompt) + len(output) - 1
        output.append(int(narrow.run([(0, position, output[-1:])])[0][0].argmax()))
    return output


@pytest.mark.slow
async def test_a_handoff_from_full_width_to_fp8(tmp_path: Path) -> None:
    folder = MIXTURES[3].make(tmp_path / "model", seed=3)
    (tmp_path / "baton.yaml").write_text(CONFIG)
    generator = random.Random(4)
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 60)]
    flags = ("--config", str(tmp_path / "baton.yaml"), "--dtype", "float32", "--numerics", "exact")
    with baton_up(folder, "--prefill", "1", "--decode", "1", *flags) as cluster:
        async with cluster.stub() as stub:
            for prompt in prompts:
                answer = await cluster.generate(
                    stub, prompt, temperature=0, ignore_eos=True, max_tokens=COUNT
                )
                assert answer.token_ids == expected(folder, prompt)
        status = await cluster.status()
        formats = {one.worker.identity.name: one.weight_format for one in status.workers}
        assert sorted(formats.values()) == ["float32", "fp8"]
        assert all(one.worker.report.experts.taken == 2 for one in status.workers)
        await assert_all_free(cluster, within_s=5)
