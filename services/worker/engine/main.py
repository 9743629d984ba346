"""`python -m services.worker.engine.main`: entry point of the engine process.

Loading creates a million objects that stay alive. The garbage collector would traverse them again and again,
a fifth of the loading time, so it is disabled until they are all there.
"""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    gc.disable()
    from services.worker.engine.process import main as run  # most of what is loaded are its imports

    return run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # grpc's threads may outlive a closed receiver; nothing is left to finish.
    os._exit(code)
