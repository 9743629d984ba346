"""Clients that stream beside a fault: tokens are as without it, nothing fails, no stream pauses for long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from baton.base.errors import BatonError
from baton.client import AsyncClient
from tests.hosts.site import Site

ANSWER_S = 90.0
_PROMPTS = (
    "Once upon a time",
    "What is Baton?",
    "The router places a request on two workers. " * 12,
    "A KV block holds the keys and values of sixteen tokens. " * 20,
)
_TOKENS = 120
# What a client may see of a fault: it is noticed within 3 s, and acted on.
GAP_S = 3.0


@dataclass(slots=True)
class Answer:
    """The tokens of one output, and the longest wait for its next ones."""

    tokens: tuple[int, ...] = ()
    longest_gap_s: float = 0.0


@dataclass(slots=True)
class Load:
    """Answers so far. `truth` has the tokens of each prompt, `calm_s` the longest gap without a fault."""

    truth: dict[str, tuple[int, ...]]
    calm_s: float
    answers: list[Answer] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    over: bool = False

    async def ask_on(self, client: AsyncClient, first: int) -> None:
        """One client: the next request once the last is answered."""
        number = first
        while not self.over:
            prompt = _PROMPTS[number % len(_PROMPTS)]
            number += 1
            try:
                answer = await ask(client, prompt)
            except BatonError as error:
                self.failed.append(f"{error.kind.name}: {error.message}")
                continue
            self.answers.append(answer)
            if answer.tokens != self.truth[prompt]:
                self.failed.append(f"other tokens for {prompt[:20]!r}: {answer.tokens}")

    @property
    def longest_gap_s(self) -> float:
        return max(answer.longest_gap_s for answer in self.answers)

    async def answered(self, more: int) -> None:
        """Waits for `more` further answers."""
        wanted = len(self.answers) + more
        async with asyncio.timeout(ANSWER_S):
            while len(self.answers) < wanted and not self.failed:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def ask(client: AsyncClient, prompt: str) -> Answer:
    answer, last = Answer(), 0.0
    stream = client.generate(prompt, deadline=ANSWER_S, max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    async for delta in stream:
        now = time.monotonic()
        if last:
            answer.longest_gap_s = max(answer.longest_gap_s, now - last)
        last = now
        answer.tokens += delta.tokens
    return answer


@contextlib.asynccontextmanager
async def streaming(site: Site, clients: int = 3, gap_s: float = GAP_S) -> AsyncIterator[Load]:
    """Clients stream while the block runs. At its end nothing has failed, all tokens are those of the calm
    before, no gap was longer than `gap_s` and the longest of the calm, and no worker holds anything."""
    async with site.client() as client:
        calm = {prompt: await ask(client, prompt) for prompt in _PROMPTS}
        load = Load(
            {prompt: answer.tokens for prompt, answer in calm.items()},
            max(answer.longest_gap_s for answer in calm.values()),
        )
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(load.ask_on(client, number))
            try:
                await load.answered(clients)
                yield load
                await load.answered(clients)
            finally:
                load.over = True
    gaps = f"longest gap {load.longest_gap_s:.2f} s, calm {load.calm_s:.2f} s"
    print(f"\nPROOF {len(load.answers)} outputs, failed: {len(load.failed)}, {gaps}")
    assert not load.failed, f"{load.failed[:5]}\n{site.logs()}"
    assert load.longest_gap_s <= gap_s + load.calm_s, site.logs()
    await site.until_whole()
