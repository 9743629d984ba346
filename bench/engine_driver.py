"""Drives an engine's loops without a worker, for measurements and tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.decode.loop import DecodeLoop
    from baton.engine.decode.slots import Grant
    from baton.engine.prefill.loop import ChunkResult, PrefillLoop
    from baton.engine.sequence import Limits, SamplingParams
    from baton.engine.shared_memory.logprob_records import Logprobs

_POLL_S = 0.0002


def admit(
    loop: DecodeLoop,
    grant: Grant,
    *,
    token_ids: Sequence[int],
    prompt_length: int,
    last_token: int,
    last_logprobs: Logprobs | None = None,
    end: int,
    sampling: SamplingParams,
    limits: Limits,
    masked: bool = False,
) -> None:
    """Posts the admission of a sequence of which all is known; the arguments are those of `begin_admission`
    and `complete`."""
    entry = loop.begin_admission(
        grant, token_ids=token_ids, prompt_length=prompt_length, end=end, sampling=sampling, limits=limits,
        masked=masked,
    )  # fmt: skip
    loop.complete(
        entry, token_ids=token_ids, prompt_length=prompt_length, sampling=sampling, last_token=last_token,
        last_logprobs=last_logprobs,
    )  # fmt: skip
    loop.admit(entry)


def take(loop: PrefillLoop) -> list[ChunkResult]:
    """The results of all prefill steps that have ended since, with their accounting done."""
    results = loop.ended()
    loop.finalize()
    return results


def prefill_step(loop: PrefillLoop) -> list[ChunkResult]:
    """Launches a prefill step where one is due, and takes what has ended; on a CPU, the same step."""
    loop.begin()
    return take(loop)


def finish(loop: PrefillLoop) -> list[ChunkResult]:
    """Runs prefill steps until there is nothing left to compute, and waits for all of them."""
    results = []
    while loop.begin() or loop.under_way:
        results += take(loop)
        if loop.under_way:
            time.sleep(_POLL_S)
    return results
