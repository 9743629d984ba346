"""Variables whose names begin with `BATON_`: which are known, and which Kubernetes sets by itself."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping

HOST_VARIABLE, NAME_VARIABLE = "BATON_HOST", "BATON_NAME"
LISTEN_VARIABLE = "BATON_LISTEN_HOST"
# Variables that are no settings: of workers in containers, of commands, of the images.
OTHERS = (HOST_VARIABLE, LISTEN_VARIABLE, NAME_VARIABLE, "BATON_API_KEY", "BATON_KERNELS", "BATON_RUN_DIR")

_PREFIX = "BATON_"
# What Kubernetes sets for a Service whose name begins with "baton" in the namespace of a pod.
_LINK = re.compile(
    r"BATON_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT = re.compile(r"BATON_([A-Z0-9_]+_)?PORT")
_LINK_ADDRESS = re.compile(r"(tcp|udp|sctp)://.+:\d+")


def is_service_link(name: str, value: str) -> bool:
    """Returns True for a variable that Kubernetes sets for a Service, whatever else has that name: for a
    Service `baton-http`, `BATON_HTTP_PORT` is `tcp://10.0.0.1:80`."""
    return bool(_LINK.fullmatch(name) or (_LINK_PORT.fullmatch(name) and _LINK_ADDRESS.fullmatch(value)))


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """A line for each variable that nothing reads, with the nearest name that something does; none for those
    of Kubernetes."""
    names = [*known, *OTHERS]
    for name, value in sorted(environment.items()):
        if name.startswith(_PREFIX) and name not in names and not is_service_link(name, value):
            near = difflib.get_close_matches(name, names, 1, 0.8)
            hint = f" (did you mean {near[0]}?)" if near else ""
            yield f"the variable {name} is not known and ignored{hint}"
