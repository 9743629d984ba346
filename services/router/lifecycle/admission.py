"""From what a client asked to requests that may run: checked, tokenised, seeded."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from baton.errors import FieldError
from services.router.request import validate
from services.router.request.request import Echo, Request
from services.router.request.served_model import Model
from services.router.text.output_text import OutputText
from services.router.text.stop_automaton import automaton_of
from services.router.tokenization.request_reader import RequestReader

if TYPE_CHECKING:
    from services.router.request.request import Asked
    from services.router.text.model_info import ModelInfo
    from services.router.tokenization.tokenizer_pool import TextPool
    from services.router.workers.pools import Pools


class Intake:
    """Both doors bring their requests here, and only here."""

    def __init__(
        self,
        served_name: str,
        info: ModelInfo,
        pool: TextPool,
        workers: Pools,
        timeout_s: float,
        max_body_bytes: int,
    ) -> None:
        self.reader = RequestReader(pool, lambda: self.model, max_body_bytes)
        self.served_name = served_name
        self.pool = pool
        self._info = info
        self._workers = workers
        self._timeout_s = timeout_s

    @property
    def max_context_tokens(self) -> int:
        """What prompt and output must fit: the model's limit, or the workers' where that is less."""
        return min(self._info.max_context_tokens, self._workers.max_context_tokens or _NO_LIMIT)

    @property
    def vocab_size(self) -> int:
        """Ids are below this: the model's limit, or the workers' where that is less."""
        return min(self._info.vocab_size, self._workers.vocab_size or _NO_LIMIT)

    @property
    def model(self) -> Model:
        """What requests are judged by, as of now."""
        return Model(self.served_name, self._info.eos_token_ids, self.vocab_size, self.max_context_tokens)

    async def admit(self, asked: Asked, arrived_ns: int, remaining_s: float | None) -> list[Request]:
        """Judges and tokenises; a request for each output, in order. `remaining_s` is the client's deadline.

        Raises FieldError for whatever may not run, BatonError(OVERLOADED) where too many tokenise.
        """
        passed_s = (time.monotonic_ns() - arrived_ns) / 1e9
        life_s = self._timeout_s - passed_s
        life_s = life_s if remaining_s is None else min(remaining_s, life_s)
        deadline = asyncio.get_running_loop().time() + life_s
        model = self.model
        fields = validate.check_fields(asked, model.served_name, model.eos, model.vocab_size)
        if sum(map(len, fields.stop)) > _LONG_STOPS:
            await self.pool.run(lambda: automaton_of(fields.stop))
        prompt_ids = await self.prompt_ids(asked)
        max_tokens = validate.check_max_tokens(asked, len(prompt_ids), self.max_context_tokens)
        min_tokens = validate.check_min_tokens(asked, max_tokens)
        echo = await self._echo(asked, prompt_ids) if asked.echo else None
        return [
            Request(
                id=secrets.token_bytes(16),
                prompt_ids=prompt_ids,
                sampling=validate.with_seed_of(fields.sampling, choice),
                max_tokens=max_tokens,
                stop_token_ids=fields.stop_token_ids,
                stop=fields.stop,
                skip_special_tokens=asked.skip_special_tokens is not False,
                arrived_ns=arrived_ns,
                deadline=deadline,
                min_tokens=min_tokens,
                echo=echo,
                choice=choice,
                call=asked.call,
            )
            for choice in range(fields.choices)
        ]

    async def prompt_ids(self, asked: Asked) -> tuple[int, ...]:
        """The prompt in tokens of the vocabulary; FieldError where there is none or it is refused."""
        if asked.prepared is not None:
            return asked.prepared
        return validate.check_token_ids(asked.named("prompt"), await self._tokenise(asked), self.vocab_size)

    def output_text(self, request: Request) -> OutputText:
        """The text side of a request's output."""
        skip = request.skip_special_tokens
        detokenizer = self.pool.detokenizer(request.prompt_ids, skip_special_tokens=skip)
        return OutputText(request, detokenizer)

    async def _tokenise(self, asked: Asked) -> tuple[int, ...]:
        if asked.token_ids is not None:
            return asked.token_ids
        if asked.chat is not None:
            return await self.pool.encode_chat(asked.chat)
        if not asked.text:
            raise FieldError("the prompt is empty", param=asked.named("prompt"))
        return await self.pool.encode_text(asked.text, special=asked.add_special_tokens)

    async def _echo(self, asked: Asked, prompt_ids: tuple[int, ...]) -> Echo:
        """The client's own text where it sent one, since tokens need not say all of it."""
        skip = asked.skip_special_tokens is not False
        model = self.model
        if asked.logprobs is None:
            return Echo(asked.text or await self.pool.decode(prompt_ids, model, skip_special_tokens=skip))
        decoded, offsets = await self.pool.decode_with_offsets(prompt_ids, model, skip_special_tokens=skip)
        return Echo(asked.text or decoded, offsets)


_NO_LIMIT = 2**62
# Characters of stop strings whose automaton takes a while to build.
_LONG_STOPS = 1024
