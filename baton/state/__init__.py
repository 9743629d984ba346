"""Soft state in Redis, which the data plane never waits for: registry, prefix index, journal; and stored
responses, for which a request waits that refers to one.

    state = State.at(url)      state.registry, prefix_index, journal

`baton.state.embedded` runs a Valkey server where no Redis is configured. This is the only package that uses
Redis; the router, the workers' front processes and `baton up` may import it. It imports neither torch, gRPC,
Ray nor services.
"""

from baton.state.journal import Journal, Receipt
from baton.state.lease import Lease
from baton.state.prefix_publisher import PrefixPublisher
from baton.state.state import State
from baton.state.stores.records import JournalRecord, Member, new_incarnation
from baton.state.stores.seal import new_journal_key
from baton.state.view import View

__all__ = [
    "Journal",
    "JournalRecord",
    "Lease",
    "Member",
    "PrefixPublisher",
    "Receipt",
    "State",
    "View",
    "new_incarnation",
    "new_journal_key",
]
