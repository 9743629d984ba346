"""Runs `baton up` or `baton demo` with fake children, as a process that tests may signal.

python with_fakes.py (up | demo) '{"worker": […], "router": […]}' [settings as YAML-like JSON]
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from baton.base.errors import BatonError, ErrorKind
from services.cli.common.messages import notify
from services.cli.up.command import up
from services.cli.up.local_cluster import Programs
from services.common.config.settings_tree.settings import Settings
from services.common.processes.child_process import ChildError

DEFAULTS = {"router": {"http_port": 0, "grpc_port": 0}, "supervision": {"ray_address": "none"}}
FAKE = str(Path(__file__).with_name("fake_child.py"))


def command_named(name: str) -> Callable[[Settings, Path, Programs], Coroutine[Any, Any, int]]:
    if name == "up":
        return up
    from services.cli.demo.command import demo  # a third of the imports, of which `up` needs none

    return demo


def main() -> int:
    command, traits, settings = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    programs = Programs(
        worker=(sys.executable, FAKE, "worker", *traits.get("worker", ())),
        router=(sys.executable, FAKE, "router", *traits.get("router", ())),
    )
    config = Settings.model_validate(DEFAULTS | settings)
    try:
        return asyncio.run(command_named(command)(config, Path(tempfile.gettempdir()), programs))
    except BatonError as error:
        notify(f"error: {error.message}")
        return 2 if error.kind is ErrorKind.INVALID else 1
    except ChildError as error:
        notify(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
