"""Workers of role both that exchange sequences: each may compute what another decodes, and itself. Tokens are
those of transformers, in float64, whichever way a request takes; nothing is held afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.support.cluster import assert_all_free, baton_up
from tests.e2e.tokens.test_exact_tokens import CUTS, FULL, REDUCED, Size, ask_both_apis, check_work, make_asks
from tests.support.checkpoints import FAMILIES
from tests.support.reference import greedy_matches, load_reference

TWO, BESIDE_PREFILL = ("--both", "2"), ("--prefill", "1", "--both", "1")


# In make test: tests/worker/engine/test_exchange.py, and the router's part in tests/router/placement.
@pytest.mark.slow
async def test_two_that_exchange(tmp_path: Path) -> None:
    await prove(2, TWO, REDUCED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [TWO, BESIDE_PREFILL], ids=lambda words: "".join(words))
@pytest.mark.parametrize("number", [0, 3, 6])
async def test_fifty_prompts(number: int, workers: tuple[str, ...], tmp_path: Path) -> None:
    await prove(number, workers, FULL, tmp_path)


async def prove(number: int, workers: tuple[str, ...], size: Size, folder: Path) -> None:
    """Runs one cluster and judges all that came out of it."""
    FAMILIES[number].make(folder, seed=11)
    cut = CUTS[number % len(CUTS)]
    asks = make_asks(cut, size)
    flags = [*workers, "--both-receives", *cut.flags, "--dtype", "float64", "--numerics", "exact"]
    with baton_up(folder, *flags, fixed=cut.fixed) as cluster:
        async with cluster.stub() as stub, cluster.http() as client:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            answers = await ask_both_apis(cluster, stub, client, asks, tokenizer)
            await assert_all_free(cluster, within_s=5)
            reports, roles = await cluster.reports(), await cluster.roles()
    reference = load_reference(folder)
    for ask, answer in zip(asks, answers, strict=True):
        greedy_matches(reference, ask.prompt, answer.token_ids)
    check_work(reports, roles, asks, answers)
    local = sum(report.handoffs_local for report in reports.values())
    assert local > 0
    if size is FULL:  # with few prompts the router may have no reason to hand any over
        assert local < sum(report.handoffs_committed for report in reports.values()), "both ways are taken"
    assert sum(report.bytes_shipped for report in reports.values()) == sum(
        report.bytes_received for report in reports.values()
    )
    assert not any(report.checksum_failures or report.dropped_unknown for report in reports.values())
