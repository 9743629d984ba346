"""An engine finds of a prompt what its tenant has sent, and nothing that another has: counts, not times.
With a whole cluster: tests/e2e/api/test_tenant_isolation.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.shared_prompts import OwnCache, prompts
from tests.worker.engine.stepped_engine import SteppedEngine
from tests.worker.engine.test_prefix_cache import BLOCK, ask, report


@pytest.mark.parametrize(
    ("turns", "apart"),
    [
        (8, True),
        pytest.param(8, False, marks=pytest.mark.slow),
        pytest.param(20, True, marks=pytest.mark.slow),
        pytest.param(20, False, marks=pytest.mark.slow),
    ],
)
def test_requests_of_eight_tenants_find_only_their_own(tmp_path: Path, turns: int, *, apart: bool) -> None:
    """Or, without tenants, what the others have left: so there was something to find."""
    names = [f"tenant-{number}" for number in range(8)]
    stepped = SteppedEngine(tmp_path, chunk_tokens=64, kv_blocks=600)
    caches = {name: OwnCache() for name in names}
    hits = exposed = more = 0
    for turn in zip(*(prompts(seed, turns, BLOCK, 60) for seed in range(8)), strict=True):
        for name, prompt in zip(names, turn, strict=True):
            predicted = caches[name].held(prompt)
            exposed += any(other.held(prompt) > predicted for other in caches.values())
            _, cached = ask(stepped, prompt.token_ids, 2, name if apart else "")
            assert cached == predicted * BLOCK or not apart
            more += cached > predicted * BLOCK
            hits += predicted
            caches[name].add(prompt)
    found = report(stepped)
    assert found.evicted_blocks == 0
    assert hits > 3 * turns
    assert exposed > turns
    assert more == (0 if apart else exposed)
    assert (found.hit_tokens == hits * BLOCK) == apart
    stepped.assert_free()
    stepped.close()
