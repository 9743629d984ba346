"""`python -m services.worker.engine.main`: an engine's process, from its first moment.

Loading makes a million objects that stay. The garbage collector, which would look at them again and again, a
fifth of the time that loading takes, is off until they are all there.
"""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    gc.disable()
    from services.worker.engine import (
        process as engine_process,  # here, since most of what is loaded are its imports
    )

    return engine_process.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # grpc's threads may outlive a receiver that stopped; nothing is left to finish.
    os._exit(code)
