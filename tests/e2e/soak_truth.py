"""Holds what clients heard against the truth: transformers' logits and the sampler in plain Python.

A request that did not finish is judged alike: what it received must be the beginning of the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.engine.sequence import Limits
from tests.e2e.soak_asks import Ask
from tests.e2e.soak_clients import Heard, Said
from tests.support.naive_sampler import naive_logprobs, naive_token
from tests.support.reference import load_reference, raw_logits

# The wire's logprobs are float32.
_CLOSE = 1e-5


class Truth:
    """A model's, in float64."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_reference(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def judge(self, heard: Heard) -> None:
        """Raises AssertionError at the first thing that is not so."""
        for choice, said in enumerate(heard.choices):
            self._tokens(heard.ask, choice, said)
            self._text(heard.ask, said, whole=heard.ending == "whole")

    def _tokens(self, ask: Ask, choice: int, said: Said) -> None:
        params, output = ask.params_of(choice), said.token_ids
        if not output:
            return
        rows = raw_logits(self._model, [*ask.prompt, *output[:-1]])[len(ask.prompt) - 1 :]
        for number, (raw, token) in enumerate(zip(rows, output, strict=True)):
            expected = naive_token(raw, params, Limits(ask.max_tokens), ask.prompt, output[:number])
            assert token == expected, f"token {number} is {token} and not {expected}: {ask}"
        if params.logprobs is not None:
            logprobs = [naive_logprobs(raw, token, 0)[0] for raw, token in zip(rows, output, strict=True)]
            assert said.logprobs == pytest.approx(logprobs, rel=_CLOSE, abs=_CLOSE), ask

    def _text(self, ask: Ask, said: Said, *, whole: bool) -> None:
        text = self._decode(said.token_ids)
        if not whole:
            # A character in the making is held back, and so is what may become a stop string.
            assert text.startswith(said.text), ask
            assert len(said.token_ids) <= ask.max_tokens
            return
        at = min((text.index(stop) for stop in ask.stop if stop in text), default=None)
        assert said.text == text[:at], ask
        if at is None:
            assert (said.finish, len(said.token_ids)) == ("length", ask.max_tokens), ask
        else:
            assert said.finish == "stop"
            before = self._decode(said.token_ids[:-1])
            assert not any(stop in before for stop in ask.stop), f"it went on after its stop string: {ask}"

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text
