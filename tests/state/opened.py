"""Opens a State and waits until it has connected."""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind
from baton.state import State
from baton.state.state import NAMESPACE
from tests.state.journal_reader import readable


async def open_state(url: str, *, namespace: str = NAMESPACE, journal_key: bytes | None = None) -> State:
    """`State.at`, once Redis has answered or is unavailable; its journal can be read.
    BatonError(UNAUTHENTICATED) where Redis refuses the password."""
    with readable():
        state = State.at(url, namespace=namespace, journal_key=journal_key)
    try:
        await state.check()
    except BatonError as error:
        if error.kind is not ErrorKind.UNAVAILABLE:
            await state.close()
            raise
    return state
