"""`python -m services.router`: reads RouterConfig as a JSON line from stdin, writes the ready line to stdout.

With `processes` above 1 it runs that number of router processes (`processes.group`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import uvloop

from services.common.config.router import RouterConfig
from services.common.processes.child_protocol import run_child

if TYPE_CHECKING:
    from services.common.processes.child_protocol import StopSignal


async def main(config: RouterConfig, stop: StopSignal) -> None:
    """Serves until `stop` is set, then drains. The parent of several processes does not load a router."""
    if config.processes > 1 and config.member is None:
        from services.router.processes.group import run_group as serve
    else:
        from services.router.process import serve
    await serve(config, stop)


if __name__ == "__main__":
    sys.exit(run_child(RouterConfig, main, uvloop.new_event_loop))
