"""Faults of one transfer, its outcome, and the totals of all transfers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtransfer.sender.transfer import Transfer


class Fault(Enum):
    """A fault of one transfer. The first group happens on the wire, the rest at its ends."""

    NONE = auto()
    FLIPPED_BIT = auto()  # in a piece's bytes
    MISPLACED_PIECE = auto()  # one field of its place is changed
    FOREIGN_PIECE = auto()  # it names another live transfer
    REPEATED_PIECE = auto()  # instead of the one behind it, which is lost
    REORDERED_PIECES = auto()
    EARLY_COMMIT = auto()  # overtakes the last piece
    REPEATED_COMMIT = auto()
    REPEATED_ANSWER = auto()
    LATE_ANSWER = auto()  # others overtake it
    REPEATED_CREDIT = auto()  # ends the link
    STOLEN_INDEX = auto()  # a piece into staging that is not the sender's: ends the link
    STRAY_FRAMES = auto()  # frames about unknown transfers
    BROKEN_LINK = auto()

    RECEIVER_FORGETS = auto()
    FORGOTTEN_AT_COMMIT = auto()
    REFUSED_COMMIT = auto()
    SENDER_WITHDRAWS = auto()
    BOTH_CANCEL = auto()
    SHORT_PUSH = auto()
    WRONG_HELD = auto()  # the sender leaves out other blocks than the receiver holds
    FORGED_TICKET = auto()
    STOLEN_TICKET = auto()  # right, but another transfer's
    REPLAYED_TICKET = auto()  # of a transfer that has ended
    OLD_TICKET = auto()  # signed by an earlier incarnation, over a link of this one
    OLD_INCARNATION = auto()  # a link is sought with an earlier incarnation
    WRONG_LAYOUT = auto()
    SENDER_RESTARTS = auto()
    RECEIVER_RESTARTS = auto()


# Faults that are there from the beginning.
AT_ONCE = {
    Fault.FORGED_TICKET, Fault.STOLEN_TICKET, Fault.REPLAYED_TICKET, Fault.OLD_TICKET, Fault.OLD_INCARNATION,
    Fault.WRONG_LAYOUT, Fault.WRONG_HELD,
}  # fmt: skip

# Whose transfer must never be admitted once the fault has struck.
FATAL = {
    Fault.FLIPPED_BIT, Fault.MISPLACED_PIECE, Fault.FOREIGN_PIECE, Fault.REPEATED_PIECE, Fault.EARLY_COMMIT,
    Fault.STOLEN_INDEX, Fault.SHORT_PUSH, Fault.FORGED_TICKET, Fault.STOLEN_TICKET, Fault.REPLAYED_TICKET,
    Fault.OLD_TICKET, Fault.OLD_INCARNATION, Fault.WRONG_LAYOUT, Fault.WRONG_HELD,
}  # fmt: skip
# What goes wrong at the ends alone.
AT_THE_ENDS = [fault for fault in Fault if fault.value >= Fault.RECEIVER_FORGETS.value]
# Corruption of what travels: each must be noticed.
CORRUPTING = {Fault.FLIPPED_BIT, Fault.MISPLACED_PIECE, Fault.FOREIGN_PIECE}


@dataclass(eq=False)
class Trial:
    """One transfer and what becomes of it at either end."""

    number: int
    fault: Fault
    counts: tuple[int, int]
    held: tuple[int, int]  # of them, leading ones that the receiver has
    strikes_at: int
    sender: int
    transfer: Transfer | None = None
    unpushed: list[tuple[int, int]] = field(default_factory=list)
    pieces: int = 0
    hit: bool = False
    sent: str | None = None  # acknowledged, failed, withdrawn, refused at once
    received: str | None = None  # committed, withdrawn, forgotten; 'never' where it was not expected
    reason: str | None = None  # why the receiver withdrew it
    answer_in: int = 0  # steps until a commit is answered
    life: int = 0  # steps an admitted transfer keeps its blocks

    def struck(self) -> bool:
        fresh, self.hit = not self.hit, True
        return fresh


@dataclass
class Counts:
    """Counts of what happened to all transfers."""

    drawn: Counter[Fault] = field(default_factory=Counter)
    struck: Counter[Fault] = field(default_factory=Counter)
    # How the receiver's end of those ended.
    noticed: Counter[tuple[Fault, str]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong_records: int = 0
    forbidden: list[str] = field(default_factory=list)
    # Counters of receivers that were restarted, added up.
    checksum_failures: int = 0
    links_broken: int = 0
    links_fenced: int = 0
