"""Measures the cost of words on a server, so that text prompts have a known length.

Only words with the same number of letters are used: in most vocabularies each is one token, and where bytes
are tokens each has the same number. The cost is the server's own usage: one request per text, with one output
token.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.common.errors import LoadgenError
from loadgen.common.record import Record
from loadgen.common.settings import Settings, Words
from loadgen.load.alphabet import LEXICON
from loadgen.targets.open_target import open_target
from loadgen.targets.target import Answer, Message, Prompt, Request, RunClock, Target

_LETTERS = 4


async def learn_words(settings: Settings) -> Words:
    """The words, their cost in tokens, and the overhead of every prompt.

    Raises LoadgenError where the server reports no usage or the words' costs differ, and Failure where it
    refuses.
    """
    words = tuple(f" {word}" for word in LEXICON if len(word) == _LETTERS)
    half = len(words) // 2
    target = open_target(settings.target, RunClock())
    try:
        await target.connect()
        first = await _count(settings, target, words[:half])
        second = await _count(settings, target, words[half : 2 * half])
        both = await _count(settings, target, words[: 2 * half])
    finally:
        await target.close()
    cost, left = divmod(both - first, half)
    overhead = first - half * cost
    if first != second or left or cost < 1 or overhead < 0:
        raise LoadgenError("this server's words differ in tokens; send token ids (--form ids)")
    return Words(words=words, cost=cost, overhead=overhead)


async def _count(settings: Settings, target: Target, words: Sequence[str]) -> int:
    text = "".join(words)
    prompt: Prompt = (Message("user", text),) if settings.target.form == "chat" else text
    record = Record(0, 0, "", 0.0, None, 1, request_id="words")
    await target.send(target.prepare(Request("words", prompt, 1, settings.load.classes[0])), record, Answer())
    if record.usage_input is None:
        raise LoadgenError("this server does not tell prompt tokens; send token ids (--form ids)")
    return record.usage_input
