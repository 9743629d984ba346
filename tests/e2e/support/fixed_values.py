"""`baton up` with other values for what is no setting, which no file, variable or flag can have.

    python -m tests.e2e.support.fixed_values up …

The values are JSON in the variable `VARIABLE`, by path: `{"transfer.piece_bytes": "4096"}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

VARIABLE = "TEST_FIXED_VALUES"
PROGRAM = (sys.executable, "-m", "tests.e2e.support.fixed_values")


def fixed_values() -> dict[str, str]:
    """The values of this process, by path."""
    return dict(json.loads(os.environ.get(VARIABLE, "{}")))


def main() -> int:
    # Imported late: the tests' own processes need none of it.
    from services.cli.parse import parse
    from services.cli.up.command import up
    from services.cli.up.model_folder import with_model
    from services.cli.up.settings import load

    config, model = with_model(load(parse(sys.argv[1:]), os.environ, fixed_values()))
    return asyncio.run(up(config, model))


if __name__ == "__main__":
    sys.exit(main())
