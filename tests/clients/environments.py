"""An environment for each client, with the newest release that pip finds, kept between runs.

python -m tests.clients.environments [NAME...]        installs those that are missing

They lie in $BATON_CLIENTS, by default ~/.cache/baton/clients; delete one to install a newer release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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
_INSTALL_S = 1200


def folder_of(client: str) -> Path:
    """Where the client's environment is, or will be."""
    cache = os.environ.get("BATON_CLIENTS") or Path.home() / ".cache" / "baton" / "clients"
    return Path(cache) / client


def python_of(client: str) -> Path:
    """The Python of the client's environment, which is installed first if it is missing."""
    folder = folder_of(client)
    if not (folder / ".done").exists():
        _install(client, folder)
    return folder / "bin" / "python"


def version_of(client: str) -> str:
    """The installed version of the client's first package."""
    program = f"import importlib.metadata as m; print(m.version({PACKAGES[client][0]!r}))"
    found = subprocess.run([python_of(client), "-c", program], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _install(client: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=_INSTALL_S)
    pip = (str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check")
    subprocess.run([*pip, *PACKAGES[client]], check=True, timeout=_INSTALL_S)
    (folder / ".done").touch()


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        print(name, version_of(name))
