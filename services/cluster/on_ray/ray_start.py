"""`python -m services.cluster.on_ray.ray_start …`: a quicker `ray start …`, without what Baton leaves unused.

Two processes are not started: the dashboard, which `--include-dashboard=false` still starts for usage
statistics and waits for, and the server of Ray's client protocol. A node's two agents run at the lowest
priority, so that they start last, and the node does not wait for the first one's port: it is told that there
is none. Ray polls once a second for the node's registration; here it is polled every 20 ms.

No option does any of this. Where a version of Ray has other names for it, it starts as it always does.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray._private.node import Node

_LAST = ("nice", "-n", "19")
_NO_PORT = -1
_REGISTERED_S, _POLL_S = 10.0, 0.02


def main() -> None:
    """Starts a Ray node and does not return: exits with Ray's code."""
    # Ray's command line imports it for commands of its own, which takes a fifth of a second.
    sys.modules["ray.serve"] = None  # type: ignore[assignment]
    from ray._private import services
    from ray._private.node import Node
    from ray.scripts.scripts import start

    for method in ("start_api_server", "start_ray_client_server"):
        setattr(Node, method, _start_nothing)
    Node.start_raylet = _without_waits(Node.start_raylet)  # type: ignore[method-assign]
    name = "_build_python_executable_command_memory_profileable"
    if build := getattr(services, name, None):
        setattr(services, name, lambda *arguments, **options: [*_LAST, *build(*arguments, **options)])
    start.main(args=sys.argv[1:], prog_name="ray start")


def _start_nothing(_: Node, **options: object) -> None:
    """Takes the place of a method that starts a process."""


def _without_waits(start_raylet: Callable[..., None]) -> Callable[..., None]:
    """`start_raylet` begins the process of a node; the one returned here ends once that has registered."""

    def start(node: Node, *arguments: object, **options: object) -> None:
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            core: Any = importlib.import_module("ray._raylet")
            name = core.DASHBOARD_AGENT_LISTEN_PORT_NAME
            core.persist_port(node._session_dir, node._node_id, name, _NO_PORT)
        start_raylet(node, *arguments, **options)
        with contextlib.suppress(ImportError, AttributeError, TypeError, RuntimeError):
            from ray import NodeID

            known: Any = node
            own, store = NodeID.from_hex(known._node_id), known.get_gcs_client()
            deadline = time.monotonic() + _REGISTERED_S
            while own not in store.get_all_node_info() and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    return start


if __name__ == "__main__":
    main()
