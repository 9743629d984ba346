"""The ports of several router processes, held by the process that starts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from services.common.config.router import RouterConfig
from services.common.rpc.grpc_server import bind_socket


@contextlib.contextmanager
def reserved_ports(config: RouterConfig) -> Iterator[RouterConfig]:
    """Yields the configuration with every port that is 0 replaced by a free one, and holds all of them.

    The sockets are bound and never listen, so connections go to the processes alone. A port without a
    listener stays ours while a process is replaced. Raises BatonError(INVALID) where a port is in use: with
    SO_REUSEPORT alone another router of the same user would get half of the connections.
    """
    admin_grpc, admin_http = config.admin_ports
    wanted = (
        ("http_port", config.host, config.http_port, True),
        ("admin_http_port", config.bound_admin_http_host, admin_http, False),
        ("grpc_port", config.host, config.grpc_port, True),
        ("admin_grpc_port", config.admin_host, admin_grpc, False),
    )
    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for name, host, port, shared in wanted:
            alone = bind_socket(host, port)
            ports[name] = alone.getsockname()[1]
            if shared:
                alone.close()
                alone = bind_socket(host, ports[name], shared=True)
            stack.enter_context(alone)
        yield config.model_copy(update=ports)
