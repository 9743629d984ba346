"""What a word costs on a server, so that prompts of text have a known length.

Only words of one length in letters are used: in most vocabularies each is one token, and where bytes are
tokens each is as many. The server is asked by what it bills: one request a text, one token of output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.common.errors import LoadgenError
from loadgen.common.record import Record
from loadgen.common.settings import Words
from loadgen.load.wording import LEXICON
from loadgen.targets.open_target import open_target
from loadgen.targets.target import Answer, Message, Prompt, Request, RunClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.common.settings import Settings
    from loadgen.targets.target import Target

_LETTERS = 4


async def learn_words(settings: Settings) -> Words:
    """The words, their cost, and what every prompt costs more.

    LoadgenError where the server does not say what it counts, or the words' costs differ. Failure where it
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
