"""Answers to commits, kept for commits that come twice."""

from __future__ import annotations

from collections import OrderedDict

from kvtransfer.protocol.frames import Committed, Refused

_REMEMBERED = 4096


class Answers:
    """The latest ones, by transfer."""

    def __init__(self) -> None:
        self._answers: OrderedDict[int, Committed | Refused] = OrderedDict()

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._answers

    def get(self, transfer_id: int, otherwise: Refused) -> Committed | Refused:
        return self._answers.get(transfer_id, otherwise)

    def remember(self, answer: Committed | Refused) -> None:
        self._answers[answer.transfer] = answer
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)
