"""A model that can be computed by hand, which the fake workers run.

next_token(ids) = (31 * sum((i + 1) * id_i) + 17) mod vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.v1.prefill_pb2 import PrefillRequest, PrefillResponse, PromptLogprobs
from baton.v1.types_pb2 import FinishReason, Logprobs, Sampling, TokenLogprob

VOCAB = 320


def next_token(ids: Sequence[int], vocab: int = VOCAB) -> int:
    """The next token by the fake model, which is a hash."""
    return (31 * sum((index + 1) * token for index, token in enumerate(ids)) + 17) % vocab


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens after `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def logprobs_of(token: int, others: int) -> Logprobs:
    """The model's logprobs of a token, whatever its context; the token itself is the most likely."""
    own = -(token + 1) / 8
    top = [TokenLogprob(token_id=(token + rank) % VOCAB, logprob=own - rank) for rank in range(others)]
    return Logprobs(logprob=own, top=top)


def with_logprobs(sampling: Sampling, tokens: Sequence[int]) -> list[Logprobs]:
    """The logprobs of each token, where the request asks for them."""
    if not sampling.HasField("logprobs"):
        return []
    return [logprobs_of(token, sampling.logprobs) for token in tokens]


def ending_of(emitted: Sequence[int], max_tokens: int, stop_ids: frozenset[int]) -> FinishReason.ValueType:
    """The reason for which an output ends with its last token, if it does."""
    if emitted[-1] in stop_ids:
        return FinishReason.FINISH_REASON_STOP
    if len(emitted) >= max_tokens:
        return FinishReason.FINISH_REASON_LENGTH
    return FinishReason.FINISH_REASON_UNSPECIFIED


def prompt_logprobs(request: PrefillRequest, forgotten: int) -> Iterator[PrefillResponse]:
    """Yields the prompt's logprobs where asked for, in runs of at most three tokens, without the last
    `forgotten` ones."""
    if not request.prompt_logprobs:
        return
    prompt = list(request.token_ids)[: request.prompt_length - forgotten]
    for start in range(1, len(prompt), 3):
        logprobs = with_logprobs(request.sampling, prompt[start : start + 3])
        yield PrefillResponse(prompt_logprobs=PromptLogprobs(first_position=start, logprobs=logprobs))
