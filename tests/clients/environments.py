"""An environment for each client, with the newest release that pip finds, kept between runs.

python -m tests.clients.environments [NAME...]        installs those that are missing

They lie in $BATON_CLIENTS, by default ~/.cache/baton/clients; delete one to install a newer release.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.environments import Environment

# Client → the packages that pip installs for it.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "openai": ("openai",),
    "instructor": ("instructor",),
    "openai-agents": ("openai-agents",),
    "langchain-openai": ("langchain-openai",),
    "llama-index-llms-openai": ("llama-index-llms-openai", "llama-index-llms-openai-like"),
    "litellm": ("litellm",),
    "aiperf": ("aiperf",),
    "guidellm": ("guidellm",),
}


def environment_of(client: str) -> Environment:
    """The place where the client is, or will be, installed."""
    cache = os.environ.get("BATON_CLIENTS") or Path.home() / ".cache" / "baton" / "clients"
    return Environment(Path(cache) / client, PACKAGES[client])


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        print(name, environment_of(name).version)
