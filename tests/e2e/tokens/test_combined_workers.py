"""Workers of role both that exchange sequences: each may compute what another decodes, and itself. Tokens are
those of transformers, in float64, whichever way a request takes; nothing is held afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.support.cluster import assert_all_free, baton_up
from tests.e2e.tokens.test_exact_tokens import CUTS, FULL, ask_both_apis, check_work, make_asks
from tests.support.checkpoints import FAMILIES
from tests.support.reference import greedy_matches, load_reference

TWO, BESIDE_PREFILL = ("--both", "2"), ("--prefill", "1", "--both", "1")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [TWO, BESIDE_PREFILL], ids=lambda words: "".join(words))
@pytest.mark.parametrize("number", [0, 3, 6])
async def test_fifty_prompts(number: int, workers: tuple[str, ...], tmp_path: Path) -> None:
    FAMILIES[number].make(tmp_path, seed=11)
    cut = CUTS[number % len(CUTS)]
    asks = make_asks(cut, FULL)
    flags = [*workers, "--both-receives", *cut.flags, "--dtype", "float64", "--numerics", "exact"]
    config = f"{cut.config.rstrip()[:-1]}, both_receives: true}}\n"
    with baton_up(tmp_path, *flags, config=config) as cluster:
        async with cluster.stub() as stub, cluster.http() as client:
            tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
            answers = await ask_both_apis(cluster, stub, client, asks, tokenizer)
            await assert_all_free(cluster, within_s=5)
            audits, roles = await cluster.audits(), await cluster.roles()
    reference = load_reference(tmp_path)
    for ask, answer in zip(asks, answers, strict=True):
        greedy_matches(reference, ask.prompt, answer.token_ids)
    check_work(audits, roles, asks, answers)
    local = sum(audit.handoffs_local for audit in audits.values())
    assert 0 < local < sum(audit.handoffs_committed for audit in audits.values()), "both ways are taken"
    assert sum(audit.bytes_shipped for audit in audits.values()) == sum(
        audit.bytes_received for audit in audits.values()
    )
    assert not any(audit.checksum_failures or audit.dropped_unknown for audit in audits.values())
