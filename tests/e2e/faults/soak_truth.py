"""Holds what clients received against the truth: transformers' logits and the sampler in plain Python.

A request that did not finish is judged alike: what it received must be the beginning of the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.engine.sequence import Limits
from tests.e2e.faults.soak_asks import Ask
from tests.e2e.faults.soak_clients import Outcome, Output
from tests.support.reference import load_reference, raw_logits
from tests.support.sampling.naive_sampler import naive_logprobs, naive_token

# The wire's logprobs are float32.
_CLOSE = 1e-5


class Truth:
    """The model's outputs, computed in float64."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_reference(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def judge(self, outcome: Outcome) -> None:
        """Raises AssertionError at the first difference."""
        for choice, output in enumerate(outcome.choices):
            self._tokens(outcome.ask, choice, output)
            self._text(outcome.ask, output, whole=outcome.ending == "whole")

    def _tokens(self, ask: Ask, choice: int, output: Output) -> None:
        params, token_ids = ask.params_of(choice), output.token_ids
        if not token_ids:
            return
        rows = raw_logits(self._model, [*ask.prompt, *token_ids[:-1]])[len(ask.prompt) - 1 :]
        for number, (raw, token) in enumerate(zip(rows, token_ids, strict=True)):
            expected = naive_token(raw, params, Limits(ask.max_tokens), ask.prompt, token_ids[:number])
            assert token == expected, f"token {number} is {token} and not {expected}: {ask}"
        if params.logprobs is not None:
            logprobs = [naive_logprobs(raw, token, 0)[0] for raw, token in zip(rows, token_ids, strict=True)]
            assert output.logprobs == pytest.approx(logprobs, rel=_CLOSE, abs=_CLOSE), ask

    def _text(self, ask: Ask, output: Output, *, whole: bool) -> None:
        text = self._decode(output.token_ids)
        if not whole:
            # A character in the making is held back, and so is what may become a stop string.
            assert text.startswith(output.text), ask
            assert len(output.token_ids) <= ask.max_tokens
            return
        at = min((text.index(stop) for stop in ask.stop if stop in text), default=None)
        assert output.text == text[:at], ask
        if at is None:
            assert (output.finish, len(output.token_ids)) == ("length", ask.max_tokens), ask
        else:
            assert output.finish == "stop"
            before = self._decode(output.token_ids[:-1])
            assert not any(stop in before for stop in ask.stop), f"it went on after its stop string: {ask}"

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text
