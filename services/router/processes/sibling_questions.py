"""Router processes ask each other for figures, over Unix sockets: one line of JSON, one answer, the end.

Whichever process a scrape or a status call reaches, it answers for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from services.common.config.router import GroupMember

_ANSWER_S = 1.0
_QUESTION_BYTES = 4096

Answer = Callable[[int], object]


class SiblingQuestions:
    """Questions between this process and its siblings; without any where `member` is None. `answers`: by
    name, what this process answers to a question, which is a number; JSON can have the answer."""

    def __init__(self, member: GroupMember | None, answers: Mapping[str, Answer]) -> None:
        self._member = member
        self._answers = answers
        self._server: asyncio.Server | None = None

    @property
    def index(self) -> int | None:
        """Index of this process; None if it is the only one."""
        return None if self._member is None else self._member.index

    async def start(self) -> None:
        """Begins to answer the siblings' questions."""
        if self._member is not None:
            path = _path(self._member, self._member.index)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of the process that this one replaces
            self._server = await asyncio.start_unix_server(self._answer, path, limit=_QUESTION_BYTES)

    async def stop(self) -> None:
        """Stops answering the siblings' questions."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def ask(self, name: str, question: int = 0) -> dict[int, Any]:
        """The answers of all siblings that answer in time, by their indexes."""
        if self._member is None:
            return {}
        others = [index for index in range(self._member.count) if index != self._member.index]
        answers = await asyncio.gather(*(self._ask(index, name, question) for index in others))
        return {index: answer for index, answer in zip(others, answers, strict=True) if answer is not None}

    async def _ask(self, index: int, name: str, question: int) -> Any:  # noqa: ANN401 (JSON)
        assert self._member is not None
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(_path(self._member, index))
                try:
                    writer.write(json.dumps([name, question]).encode() + b"\n")
                    return json.loads(await reader.read())
                finally:
                    writer.close()
        return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError, KeyError):
            async with asyncio.timeout(_ANSWER_S):
                name, question = json.loads(await reader.readline())
                writer.write(json.dumps(self._answers[name](question)).encode())
                await writer.drain()
        writer.close()


def _path(member: GroupMember, index: int) -> str:
    return f"{member.folder}/{index}.questions"
