"""The `baton` command: finds the command that its first words name, and runs it.

Exit codes: 0 success, 1 a failure at run time, 2 wrong arguments, configuration or model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from baton.base.errors import BatonError, ErrorKind
from services.cli.common.messages import discard, notify
from services.cli.common.parser import REFUSED
from services.cli.parse import parse
from services.common.processes.child_process import ChildError

FAILED = 1
_RUN_TIME = (ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL, ErrorKind.DEADLINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code. Raises SystemExit after `--help`, `--version`, and
    arguments that are wrong."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    # gRPC would log connections that close at a stop.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        code: int = arguments.command(arguments)
        return code
    except BatonError as error:
        notify(f"error: {error.message}")
        return FAILED if error.kind in _RUN_TIME else REFUSED
    except ChildError as error:
        notify(f"error: {error}")
        return FAILED
    except BrokenPipeError:
        discard(sys.stdout)
        return FAILED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
