"""Everything Baton keeps in Redis: soft state that the data plane never waits for.

state = await State.open(url)      state.registry, load_hints, prefix_index, journal
from baton.state.embedded import EmbeddedServer      a Redis of our own where there is none
"""

from baton.state.journal import Journal, Receipt
from baton.state.lease import Lease
from baton.state.memory import Memory
from baton.state.prefix_publisher import PrefixPublisher
from baton.state.records import JournalRecord, LoadHint, Member, new_incarnation
from baton.state.seal import draw_journal_key
from baton.state.state import State
from baton.state.view import View

__all__ = [
    "Journal",
    "JournalRecord",
    "Lease",
    "LoadHint",
    "Member",
    "Memory",
    "PrefixPublisher",
    "Receipt",
    "State",
    "View",
    "draw_journal_key",
    "new_incarnation",
]
