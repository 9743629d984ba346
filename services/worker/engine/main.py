"""`python -m services.worker.engine.main`: entry point of the engine process.

Loading creates a million objects that stay alive. The garbage collector would traverse them again and again,
a fifth of the loading time, so it is disabled until they are all there.
"""

from __future__ import annotations

import gc
import os
import sys
from types import ModuleType


def main() -> int:
    gc.disable()
    load_torch()
    from services.worker.engine.process import main as run  # most of what is loaded are its imports

    return run()


def load_torch() -> None:
    """Loads torch without what its device `meta` computes with, a quarter of the time that the import takes.
    Only `kernel_tuning` uses that device, and loads it."""
    name = "torch._meta_registrations"
    if "torch" in sys.modules:
        return
    sys.modules[name] = ModuleType(name)
    try:
        import torch as torch
    finally:
        del sys.modules[name]


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # grpc's threads may outlive a closed receiver; nothing is left to finish.
    os._exit(code)
