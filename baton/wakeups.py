"""Whether a thread that is woken interrupts the one that runs (`sched(7)`).

gRPC's own thread is woken for every message that was written or has come. As Linux has it by default, it
then interrupts the event loop, which is in the middle of a burst of them, for a word that the loop will not
hear before the burst ends: two switches a message.
"""

from __future__ import annotations

import contextlib
import os


def batch_wakeups() -> None:
    """This thread, and threads and children that it starts from now on, wait when woken until whatever runs
    on their core pauses. For processes of one event loop and the threads that feed it.

    Asking is allowed to all; a sandbox that does not know of it leaves all as it was.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
